"""One workload twice: on a live pipeline, and through the simulator with a measured cost table."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from orca_dist.bench.jobs import make_jobs, ordinary_ids
from orca_dist.bench.offline import Run
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.engine.engine import Engine
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.sim.report import make_report
from orca_dist.sim.simulation import Setup, simulate
from orca_dist.sim.table import CostTable, StageCurves, read_cost_table
from orca_dist.sim.workload import Workload

TIMED_STAGE, TIMED_VARIABLE = "orca_dist.stage.timed", "TIMED_STAGE_COST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Requests per second, and medians in seconds."""

    throughput_req_s: float
    normalized_latency_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What was measured, what the simulator says, and their ratio."""

    measured: Figures
    simulated: Figures

    @property
    def ratio(self) -> Figures:
        """Simulated over measured."""
        pairs = zip(_values(self.simulated), _values(self.measured), strict=True)
        throughput, latency, ttft = (simulated / measured for simulated, measured in pairs)
        return Figures(throughput_req_s=throughput, normalized_latency_s=latency, ttft_s=ttft)


def predict(
    model: Path,
    config: EngineConfig,
    table_path: Path,
    workload: Workload,
    *,
    seed: int,
    timed: bool,
    log_config: LogConfig,
    on_progress: Callable[[int, int], None],
) -> Prediction:
    """`timed`: stages of the live pipeline only wait for as long as the table says."""
    table = read_cost_table(table_path)
    placement = LocalPlacement(TIMED_STAGE) if timed else None
    with _variable(TIMED_VARIABLE, str(table_path.resolve())):
        engine = Engine.start(model, config, log_config=log_config, placement=placement)
    try:
        jobs = make_jobs(workload, seed=seed, ids=ordinary_ids(engine.spec.vocab_size))
        run = Run(engine, jobs, on_progress)
        run.to_the_end()
        schedule = replace(config, kv_tokens=engine.kv_tokens)
    finally:
        engine.close()
    return Prediction(measured=_measured(run), simulated=_simulated(schedule, table, workload))


def _measured(run: Run) -> Figures:
    jobs = dict(zip(run.ids, run.jobs, strict=True))
    due_s = {id: run.start_s + job.at_s for id, job in jobs.items()}
    took_s = max(run.end_s.values()) - min(due_s.values())
    return Figures(
        throughput_req_s=len(jobs) / took_s,
        normalized_latency_s=statistics.median(
            (run.end_s[id] - due_s[id]) / job.out for id, job in jobs.items()
        ),
        ttft_s=statistics.median(run.first_s[id] - due_s[id] for id in jobs),
    )


def _simulated(schedule: EngineConfig, table: CostTable, workload: Workload) -> Figures:
    cost = replace(table, stages=_as_many(table, schedule.stages))
    setup = Setup(schedule=schedule, cost=cost, latency=table.latency)
    report = make_report(simulate(setup, workload))
    assert report.normalized_latency_s.p50 is not None
    assert report.ttft_s.p50 is not None
    return Figures(
        throughput_req_s=report.throughput_req_s,
        normalized_latency_s=report.normalized_latency_s.p50,
        ttft_s=report.ttft_s.p50,
    )


def _as_many(table: CostTable, num_stages: int) -> tuple[StageCurves, ...]:
    """The table's stages in turn, for a pipeline of any length."""
    return tuple(table.stages[stage % len(table.stages)] for stage in range(num_stages))


def _values(figures: Figures) -> tuple[float, float, float]:
    return figures.throughput_req_s, figures.normalized_latency_s, figures.ttft_s


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """For the child processes that start in the block."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
