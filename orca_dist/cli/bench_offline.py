"""`orca-dist bench offline`: a workload from its first request to its last answer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.bench.jobs import Job, make_jobs, ordinary_ids
from orca_dist.cli.output import count_progress, print_json, results_only
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.trace import read_workload
from orca_dist.sim.workload import Arrivals, Workload, make_workload
from orca_dist.spec import load_spec

if TYPE_CHECKING:
    from orca_dist.bench.offline import OfflineResult

PAPER_PROMPTS = Lengths(low=32, high=512)
PAPER_OUTPUTS = Lengths(low=1, high=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFlags:
    """What is run, and on which stages."""

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

    def jobs(self, folder: Path) -> list[Job]:
        """The requests, for the model of `folder`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOffline(OfflineFlags):
    """Run a workload from its first request to its last answer, on stages of its own.

    By default the Orca paper's mix: prompts of 32 to 512 random tokens, answers of 1 to 128.
    """

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.offline import run_offline
        from orca_dist.llm import resolve_model

        self.engine.check()
        folder = resolve_model(self.model)
        jobs = self.jobs(folder)
        with results_only(), count_progress("requests") as on_progress:
            result = run_offline(folder, self.engine, jobs, log, on_progress)
        if self.json:
            print_json(offline_document(result))
        else:
            print("\n".join(offline_lines(result)))
        return 0


def offline_document(result: OfflineResult) -> dict[str, object]:
    """As --json has it."""
    document = dataclasses.asdict(result)
    document["stages"] = [{"busy": stage.busy, "bubble": 1 - stage.busy} for stage in result.stages]
    return document


def offline_lines(result: OfflineResult) -> list[str]:
    """For people."""
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
