"""`orca-dist simulate`: a workload through the server's scheduler on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.output import count_progress, print_json
from orca_dist.cli.sim_costs import CostFlags, SimulatedCost
from orca_dist.cli.sim_tables import print_points, print_report
from orca_dist.cli.sim_workloads import WorkloadFlags
from orca_dist.config import LogConfig, ScheduleConfig
from orca_dist.errors import ConfigError
from orca_dist.logs import Origin, set_up_logging
from orca_dist.sim import plot
from orca_dist.sim.report import Report, make_report
from orca_dist.sim.simulation import Record, Setup, simulate
from orca_dist.sim.workload import Workload

PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate:
    """Simulate a pipeline: the server's own scheduler on a virtual clock, without a model.

    `orca-dist simulate paper` shows the Orca paper's evaluation instead.
    """

    model: Positional[str] = ""
    """Model folder whose shapes --gpu computes with; or the default model's name."""
    config: Path | None = None
    """YAML file with settings, a server's own; flags win over it."""
    plot: Path | None = None
    """Draw the pipeline over time (with --rates: latency over throughput) into this file:
    .png, .svg or .pdf; needs the extra orca-dist[plot]."""
    json: bool = False
    """Print one JSON document instead."""
    workload: OmitArgPrefixes[WorkloadFlags]
    cost: OmitArgPrefixes[CostFlags]
    schedule: OmitArgPrefixes[ScheduleConfig]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        """Returns 0; raises ConfigError for what can't be simulated."""
        set_up_logging(self.log, Origin())
        self._check()
        cost = self.cost.cost_of(self.model, self.schedule)
        if rates := self.workload.each_rate():
            self._run_rates(cost, rates)
        else:
            self._run_once(cost, self.workload.make())
        return 0

    def _check(self) -> None:
        if self.model == PAPER:
            raise ConfigError(f"{PAPER} goes first: orca-dist simulate {PAPER} --json")
        self.schedule.check()
        if self.plot is not None:
            plot.check_target(self.plot)

    def _setup(self, cost: SimulatedCost) -> Setup:
        schedule = self.schedule
        if schedule.kv_tokens is None:
            schedule = replace(schedule, kv_tokens=cost.kv_tokens)
        return Setup(
            schedule=schedule,
            cost=cost.cost,
            latency=cost.latency,
            reserve_len=self.workload.reserve_len,
            whole_batches=self.workload.whole_batches,
            keep_runs=plot.MAX_PLANS if self.plot else 0,
        )

    def _run_once(self, cost: SimulatedCost, workload: Workload) -> None:
        record = _simulated(self._setup(cost), workload, "simulating")
        if self.plot is not None:
            plot.draw_pipeline(self.plot, record.runs)
        report = make_report(record)
        if self.json:
            print_json(report.document())
        else:
            print_report(report, num_tokens=sum(record.outs), num_requests=len(record.outs))

    def _run_rates(self, cost: SimulatedCost, rates: list[float]) -> None:
        setup = replace(self._setup(cost), keep_runs=0)
        points = [self._point(setup, rate) for rate in rates]
        if self.plot is not None:
            plot.draw_curves(self.plot, points)
        if self.json:
            pairs = zip(rates, points, strict=True)
            print_json({"points": [{"rate": rate, **each.document()} for rate, each in pairs]})
        else:
            print_points(rates, points)

    def _point(self, setup: Setup, rate: float) -> Report:
        return make_report(_simulated(setup, self.workload.make(rate), f"{rate:g} requests/s"))


def _simulated(setup: Setup, workload: Workload, title: str) -> Record:
    with count_progress(title) as on_progress:
        return simulate(setup, workload, on_progress)
