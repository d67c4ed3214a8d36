"""`orca-dist bench frontend`: what everything around the stages costs an iteration."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from orca_dist.cli.interrupts import interruptible
from orca_dist.cli.output import count_progress, print_json
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError

if TYPE_CHECKING:
    from orca_dist.bench.frontend import FrontendCost

MAX_STREAMS, MAX_STAGES = 100_000, 1000
HEADS = ("stages", "streams", "batch", "CPU ms", "front", "master", "control", "gRPC", "client",
         "messages", "wall ms", "tokens/s", "ms/token")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFrontend:
    """Time the server's own part of an iteration, by how many streams are open.

    Real front, engine master and control plane, over stages that compute nothing. Milliseconds of
    CPU time for each iteration, the client's in a process apart.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder, of which only the small files are read; or the default model's name."""
    streams: tuple[int, ...] = (64, 256, 1024)
    """Streams that are open at once, one row each for every number of stages."""
    stages: tuple[int, ...] = (2, 8)
    """Stages, each a process of this machine that computes nothing."""
    wait_s: float = 0.05
    """Time that a stage takes over a plan, waiting. With 0 iterations come faster than their tokens
    can be streamed one by one, and a message has several."""
    duration_s: float = 5.0
    """Time to measure each row, once all of its streams run."""
    tpot_limit_s: float = 0.2
    """max_streams is the most streams of which each got a token in this time, on average."""
    json: bool = False
    """Print one JSON document instead."""

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.frontend import max_streams, run_frontend
        from orca_dist.llm import resolve_model

        self._check()
        folder = resolve_model(self.model)
        with count_progress("rows") as on_progress:
            work = run_frontend(
                folder,
                stages=self.stages,
                streams=self.streams,
                wait_s=self.wait_s,
                duration_s=self.duration_s,
                on_progress=on_progress,
            )
            costs = asyncio.run(interruptible(work))
        most = max_streams(costs, self.tpot_limit_s)
        if self.json:
            print_json(_document(costs, most))
        else:
            print("\n".join(_lines(costs, most)))
        return 0

    def _check(self) -> None:
        for name, values, limit in (
            ("streams", self.streams, MAX_STREAMS),
            ("stages", self.stages, MAX_STAGES),
        ):
            for value in values:
                if not 1 <= value <= limit:
                    raise ConfigError(f"{name} = {value}: must be at least 1 and at most {limit}")
        for name, seconds in (("duration_s", self.duration_s), ("tpot_limit_s", self.tpot_limit_s)):
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name} = {seconds}: must be more than 0, and finite")
        if not 0 <= self.wait_s < math.inf:
            raise ConfigError(f"wait_s = {self.wait_s}: must be at least 0, and finite")


def _document(costs: Sequence[FrontendCost], most: Mapping[int, int]) -> dict[str, object]:
    return {
        "rows": [dataclasses.asdict(each) for each in costs],
        "max_streams": [{"stages": stages, "streams": num} for stages, num in most.items()],
    }


def _lines(costs: Sequence[FrontendCost], most: Mapping[int, int]) -> list[str]:
    rows = [_row(each) for each in costs]
    limits = [f"{num} with {stages} stages" for stages, num in most.items()]
    return ["".join(f"{head:>10}" for head in HEADS), *rows, f"max streams: {', '.join(limits)}"]


def _row(cost: FrontendCost) -> str:
    cells = (
        f"{cost.stages}",
        f"{cost.streams}",
        f"{cost.batch:.1f}",
        f"{cost.cpu_ms:.2f}",
        f"{cost.front_ms:.2f}",
        f"{cost.master_ms:.2f}",
        f"{cost.control_ms:.2f}",
        f"{cost.grpc_ms:.2f}",
        f"{cost.generator_ms:.2f}",
        f"{cost.messages:.1f}",
        f"{cost.wall_ms:.2f}",
        f"{cost.tokens_s:.0f}",
        f"{1e3 * cost.tpot_s:.1f}",
    )
    return "".join(f"{cell:>10}" for cell in cells)
