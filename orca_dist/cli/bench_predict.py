"""`orca-dist bench predict`: how well the simulator predicts this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.output import count_progress, print_json, results_only
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import parse_lengths
from orca_dist.sim.table import read_cost_table
from orca_dist.sim.workload import Arrivals, Workload, make_workload

if TYPE_CHECKING:
    from orca_dist.bench.predict import Prediction

FIGURES = ("throughput_req_s", "normalized_latency_s", "ttft_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPredict:
    """Run a workload on stages of its own and through the simulator, and compare.

    Measure the table with `orca-dist profile` first, with the same stages and threads.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder; or the name of the default model, which is fetched once."""
    cost: Path = Path("cost.json")
    """Cost table, as orca-dist profile writes it."""
    requests: int = 60
    """Requests to send."""
    prompt_lens: str = "16-128"
    """Tokens of a prompt: 8, a range to draw from (32-512), or a list to go through (5,50,8)."""
    output_lens: str = "8-64"
    """Tokens of an answer, written like --prompt-lens."""
    rate: float | None = None
    """Requests per second, Poisson; by default all come at once."""
    seed: int = 0
    """Of lengths, arrivals and tokens."""
    timed: bool = False
    """Let the stages wait for as long as the table says, computing nothing: for more stages than
    this machine could feed. The table's stages are taken in turn."""
    json: bool = False
    """Print one JSON document instead."""
    engine: OmitArgPrefixes[EngineConfig]

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.predict import predict
        from orca_dist.llm import resolve_model

        self.engine.check()
        self._check_stages()
        workload = self._workload()
        folder = resolve_model(self.model)
        with results_only(), count_progress("requests") as on_progress:
            prediction = predict(
                folder,
                self.engine,
                self.cost,
                workload,
                seed=self.seed,
                timed=self.timed,
                log_config=log,
                on_progress=on_progress,
            )
        if self.json:
            print_json(_document(prediction))
        else:
            print("\n".join(_lines(prediction)))
        return 0

    def _check_stages(self) -> None:
        found = read_cost_table(self.cost).num_stages
        if found != self.engine.stages and not self.timed:
            raise ConfigError(
                f"stages = {self.engine.stages}: {self.cost} was measured with {found}; take as "
                "many, or --timed"
            )

    def _workload(self) -> Workload:
        return make_workload(
            num_requests=self.requests,
            prompt_lens=parse_lengths("prompt_lens", self.prompt_lens),
            output_lens=parse_lengths("output_lens", self.output_lens),
            arrivals=Arrivals(rate=self.rate),
            seed=self.seed,
        )


def _document(prediction: Prediction) -> dict[str, object]:
    rows = {"measured": prediction.measured, "simulated": prediction.simulated}
    return {name: dataclasses.asdict(row) for name, row in rows.items()} | {
        "ratio": dataclasses.asdict(prediction.ratio)
    }


def _lines(prediction: Prediction) -> list[str]:
    rows = _document(prediction)
    head = f"{'':10}" + "".join(f"{name:>22}" for name in FIGURES)
    return [head, *(f"{name:10}" + _cells(row) for name, row in rows.items())]


def _cells(row: object) -> str:
    assert isinstance(row, dict)
    return "".join(f"{row[name]:>22.4f}" for name in FIGURES)
