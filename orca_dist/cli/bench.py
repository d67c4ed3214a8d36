"""`orca-dist bench`: measure a part of the system on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, subcommand

from orca_dist.bench.jobs import Job, make_jobs, ordinary_ids
from orca_dist.cli.bench_frontend import BenchFrontend
from orca_dist.cli.bench_predict import BenchPredict
from orca_dist.cli.bench_serve import BenchServe
from orca_dist.cli.output import count_progress, print_json, results_only
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.errors import ConfigError
from orca_dist.logs import Origin, set_up_logging
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.trace import read_workload
from orca_dist.sim.workload import Arrivals, Workload, make_workload
from orca_dist.spec import load_spec

if TYPE_CHECKING:
    from orca_dist.bench.offline import OfflineResult

MAX_SIZE = 10_000_000
PAPER_PROMPTS = Lengths(low=32, high=512)
PAPER_OUTPUTS = Lengths(low=1, high=128)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOffline:
    """Run a workload from its first request to its last answer, on stages of its own.

    By default the Orca paper's mix: prompts of 32 to 512 random tokens, answers of 1 to 128.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder; or the name of the default model, which is fetched once."""
    requests: int = 64
    """Requests to make, all there from the start."""
    seed: int = 0
    """Of their lengths and tokens."""
    workload: Path | None = None
    """File of requests to run instead, each with a prompt (token ids or a length) and out."""
    json: bool = False
    """Print one JSON document instead."""
    engine: OmitArgPrefixes[EngineConfig]

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.offline import run_offline
        from orca_dist.llm import resolve_model

        self.engine.check()
        folder = resolve_model(self.model)
        jobs = self._jobs(folder)
        with results_only(), count_progress("requests") as on_progress:
            result = run_offline(folder, self.engine, jobs, log, on_progress)
        if self.json:
            print_json(_document(result))
        else:
            print("\n".join(_lines(result)))
        return 0

    def _jobs(self, folder: Path) -> list[Job]:
        ids = ordinary_ids(load_spec(folder).vocab_size)
        return make_jobs(self._workload(), seed=self.seed, ids=ids)

    def _workload(self) -> Workload:
        if self.workload is not None:
            return read_workload(self.workload)
        return make_workload(
            num_requests=self.requests,
            prompt_lens=PAPER_PROMPTS,
            output_lens=PAPER_OUTPUTS,
            arrivals=Arrivals(),
            seed=self.seed,
        )


def _document(result: OfflineResult) -> dict[str, object]:
    document = dataclasses.asdict(result)
    document["stages"] = [{"busy": stage.busy, "bubble": 1 - stage.busy} for stage in result.stages]
    return document


def _lines(result: OfflineResult) -> list[str]:
    head = [
        f"{result.total_tok_s:.1f} tokens/s in all, {result.output_tok_s:.1f} of answers",
        f"{result.prompt_tokens} prompt and {result.output_tokens} answer tokens in "
        f"{result.wall_s:.2f} s, {result.iterations} iterations; start {result.startup_s:.1f} s",
        f"first token after {result.ttft_s:.2f} s (median); {result.cached_tokens} prompt tokens "
        f"cached, {result.preempted} preemptions; peak memory {result.peak_rss_mb:.0f} MB",
    ]
    return head + [
        f"stage {index}: busy {100 * stage.busy:.1f} %, {stage.iterations} iterations, "
        f"{stage.bytes_sent / 1e6:.1f} MB sent"
        for index, stage in enumerate(result.stages)
    ]


BENCHES: dict[str, type[Any]] = {
    "scheduler": BenchScheduler,
    "frontend": BenchFrontend,
    "offline": BenchOffline,
    "serve": BenchServe,
    "predict": BenchPredict,
}
Part = (
    Annotated[BenchScheduler, subcommand("scheduler")]
    | Annotated[BenchFrontend, subcommand("frontend")]
    | Annotated[BenchOffline, subcommand("offline")]
    | Annotated[BenchServe, subcommand("serve")]
    | Annotated[BenchPredict, subcommand("predict")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measure a part of the system on this machine."""

    part: OmitArgPrefixes[Part]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        set_up_logging(self.log, Origin())
        return self.part.run(self.log)
