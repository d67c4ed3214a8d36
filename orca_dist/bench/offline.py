"""A workload from a list to its last answer, through the whole engine: throughput and where
the time went.

All requests are there from the start, or come at their times; each gets exactly the tokens
that the workload says. Times of first tokens are when the master has them.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from orca_dist.bench.jobs import Job
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.core import FinishReason, Output, Request
from orca_dist.engine.engine import Engine
from orca_dist.errors import ConfigError, OrcaError, RequestFailed
from orca_dist.metrics.trace import PlanTrace, StageSummary, summarize

MEMORY_INTERVAL_S = 0.2
MEMORY_SHARE = 0.02  # of a core, at most: the system walks every page to say how many are shared
WARM_UP_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """`ttft_s`: median, from a request's time. `peak_rss_mb`: of all processes, what they share
    counted once. `wall_s`: from the first request to the last token, start-up apart."""

    wall_s: float
    startup_s: float
    prompt_tokens: int
    output_tokens: int
    total_tok_s: float
    output_tok_s: float
    ttft_s: float
    cached_tokens: int
    preempted: int
    iterations: int
    peak_rss_mb: float
    stages: tuple[StageSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """What came out, the iterations that made it (warm-up apart), and the layers of each stage."""

    result: OfflineResult
    plans: tuple[PlanTrace, ...]
    layers: tuple[range, ...]


def run_offline(
    model: Path,
    config: EngineConfig,
    jobs: Sequence[Job],
    log_config: LogConfig,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OfflineResult:
    """As trace_offline, for those who want figures alone."""
    return trace_offline(model, config, jobs, log_config, on_progress).result


def trace_offline(
    model: Path,
    config: EngineConfig,
    jobs: Sequence[Job],
    log_config: LogConfig,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OfflineRun:
    """`on_progress` hears how many of how many requests have ended.

    Raises what Engine.start raises, and the error of the first request that fails.
    """
    with _peak_memory() as peak_mb:
        began = time.perf_counter()
        engine = Engine.start(model, config, log_config=log_config)
        startup_s = time.perf_counter() - began
        try:
            check_jobs(engine, jobs)
            run = Run(engine, jobs, on_progress)
            run.to_the_end()
            engine.flush_trace()
            plans = [plan for plan in engine.trace() if WARM_UP_ID not in plan.ids]
            return OfflineRun(
                result=_result(run, plans, engine, startup_s, peak_mb()),
                plans=tuple(plans),
                layers=tuple(stage.layers for stage in engine.info().stages),
            )
        finally:
            engine.close()


class Run:
    """Submits jobs at their times and notes when each has its first and last token."""

    def __init__(
        self,
        engine: Engine,
        jobs: Sequence[Job],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        first_id: int = 1,
    ) -> None:
        self.jobs = jobs
        self.ids = range(first_id, first_id + len(jobs))
        self.start_s = 0.0
        self.first_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}
        self.cached_tokens = 0
        self._engine = engine
        self._on_progress = on_progress
        self._news: queue.SimpleQueue[tuple[float, Sequence[Output] | OrcaError]] = (
            queue.SimpleQueue()
        )
        engine.attach(deliver=self._note, lose=self._note)

    def to_the_end(self) -> None:
        """Returns once all jobs have their tokens."""
        waiting = sorted(zip(self.ids, self.jobs, strict=True), key=lambda pair: pair[1].at_s)
        self.start_s = time.perf_counter()
        for id, job in waiting:
            while (left_s := self.start_s + job.at_s - time.perf_counter()) > 0:
                self._take(left_s)
            self._engine.submit(Request(id=id, prompt=job.prompt, max_tokens=job.out))
        while len(self.end_s) < len(self.jobs):
            self._take(None)

    def _note(self, news: Sequence[Output] | OrcaError) -> None:
        """On the master's thread: the time is when it has them."""
        self._news.put((time.perf_counter(), news))

    def _take(self, timeout_s: float | None) -> None:
        try:
            now_s, news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(news, OrcaError):
            raise news
        for output in news:
            self._on_output(output, now_s)

    def _on_output(self, output: Output, now_s: float) -> None:
        if output.reason is FinishReason.ERROR:
            raise RequestFailed(output.message)
        if output.id not in self.first_s:
            self.first_s[output.id] = now_s
            self.cached_tokens += output.cached_tokens
        if output.reason:
            self.end_s[output.id] = now_s
            self._on_progress(len(self.end_s), len(self.jobs))


def check_jobs(engine: Engine, jobs: Sequence[Job]) -> None:
    """Raises ConfigError for the first that the engine could not answer in full."""
    limit = min(engine.max_model_len, engine.kv_tokens)
    for index, job in enumerate(jobs):
        if len(job.prompt) + job.out > limit:
            raise ConfigError(
                f"request {index} of the workload: prompt {len(job.prompt)} and out {job.out} are "
                f"more than the {limit} tokens that a request may have here"
            )
        if not all(0 <= token < engine.spec.vocab_size for token in job.prompt):
            raise ConfigError(
                f"request {index} of the workload: its token ids are not all in the vocabulary "
                f"of {engine.spec.vocab_size}"
            )


def _result(
    run: Run, plans: Sequence[PlanTrace], engine: Engine, startup_s: float, peak_mb: float
) -> OfflineResult:
    wall_s = max(run.end_s.values()) - run.start_s
    prompt_tokens = sum(len(job.prompt) for job in run.jobs)
    output_tokens = sum(job.out for job in run.jobs)
    pairs = zip(run.ids, run.jobs, strict=True)
    waits = [run.first_s[id] - run.start_s - job.at_s for id, job in pairs]
    summary = summarize(plans, len(engine.info().stages))
    return OfflineResult(
        wall_s=wall_s,
        startup_s=startup_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        total_tok_s=(prompt_tokens + output_tokens) / wall_s,
        output_tok_s=output_tokens / wall_s,
        ttft_s=statistics.median(waits),
        cached_tokens=run.cached_tokens,
        preempted=engine.load().preempted,
        iterations=summary.iterations,
        peak_rss_mb=peak_mb,
        stages=summary.stages,
    )


@contextmanager
def _peak_memory() -> Iterator[Callable[[], float]]:
    """Watches this process and all below it; the call gives the peak so far, in MB."""
    over, peak = threading.Event(), [0.0]

    def watch() -> None:
        took_s = 0.0
        while not over.wait(max(MEMORY_INTERVAL_S, took_s / MEMORY_SHARE)):
            began = time.perf_counter()
            peak[0] = max(peak[0], _memory_mb())
            took_s = time.perf_counter() - began

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield lambda: max(peak[0], _memory_mb())
    finally:
        over.set()
        thread.join()


def _memory_mb() -> float:
    """Proportional set size: a page that processes share counts once in all."""
    mine = psutil.Process()
    total = 0
    for process in (mine, *mine.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total / 1e6
