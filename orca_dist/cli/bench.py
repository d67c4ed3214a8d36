"""`orca-dist bench`: measure a part of the system on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import OmitArgPrefixes, subcommand

from orca_dist.cli.bench_chaos import BenchChaos
from orca_dist.cli.bench_frontend import BenchFrontend
from orca_dist.cli.bench_kernels import BenchKernels
from orca_dist.cli.bench_offline import BenchOffline
from orca_dist.cli.bench_predict import BenchPredict
from orca_dist.cli.bench_roofline import BenchRoofline
from orca_dist.cli.bench_serve import BenchServe
from orca_dist.cli.bench_soak import BenchSoak
from orca_dist.cli.output import print_json
from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError
from orca_dist.logs import Origin, set_up_logging

MAX_SIZE = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchScheduler:
    """Time the scheduler's part of an iteration, by how many requests wait and run."""

    waiting: tuple[int, ...] = (1000, 1_000_000)
    """Requests that wait, one row each for every number that runs."""
    running: tuple[int, ...] = (1, 32, 256)
    """Requests that run, all in one batch."""
    iterations: int = 500
    """Iterations to time; the rows are medians."""
    json: bool = False
    """Print one JSON document instead."""

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.scheduler import measure

        self._check()
        sizes = [(waiting, running) for running in self.running for waiting in self.waiting]
        rows = measure(sizes, iterations=self.iterations)
        if self.json:
            print_json({"rows": [dataclasses.asdict(row) for row in rows]})
            return 0
        print(f"{'waiting':>9} {'running':>8} {'us/iteration':>13} {'select':>8} {'result':>8}")
        for row in rows:
            print(
                f"{row.waiting:>9} {row.running:>8} {row.us_per_iteration:>13.1f}"
                f" {row.select_us:>8.1f} {row.on_result_us:>8.1f}"
            )
        return 0

    def _check(self) -> None:
        for name, least in (("waiting", 0), ("running", 1)):
            for value in getattr(self, name):
                if not least <= value <= MAX_SIZE:
                    raise ConfigError(
                        f"{name} = {value}: must be at least {least} and at most {MAX_SIZE}"
                    )
        if self.iterations < 1:
            raise ConfigError(f"iterations = {self.iterations}: must be at least 1")


BENCHES: dict[str, type[Any]] = {
    "scheduler": BenchScheduler,
    "frontend": BenchFrontend,
    "offline": BenchOffline,
    "kernels": BenchKernels,
    "roofline": BenchRoofline,
    "serve": BenchServe,
    "predict": BenchPredict,
    "chaos": BenchChaos,
    "soak": BenchSoak,
}
Part = (
    Annotated[BenchScheduler, subcommand("scheduler")]
    | Annotated[BenchFrontend, subcommand("frontend")]
    | Annotated[BenchOffline, subcommand("offline")]
    | Annotated[BenchKernels, subcommand("kernels")]
    | Annotated[BenchRoofline, subcommand("roofline")]
    | Annotated[BenchServe, subcommand("serve")]
    | Annotated[BenchPredict, subcommand("predict")]
    | Annotated[BenchChaos, subcommand("chaos")]
    | Annotated[BenchSoak, subcommand("soak")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measure a part of the system on this machine."""

    part: OmitArgPrefixes[Part]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        set_up_logging(self.log, Origin())
        return self.part.run(self.log)
