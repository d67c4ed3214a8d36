"""The virtual pipeline: order, links, latencies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orca_dist.config import ScheduleConfig
from orca_dist.core import Output, Plan, Request
from orca_dist.scheduling import make_scheduler
from orca_dist.sim.pipeline import ControlLatency, PlanRun, PlanTimes, VirtualPipeline


class Fixed:
    """Stages of given times; remembers what it is told."""

    def __init__(self, stage_s: list[float], link_s: float = 0.0) -> None:
        self.stage_s = stage_s
        self.link_s = link_s
        self.runs: list[PlanRun] = []
        self.outputs: list[Output] = []

    @property
    def num_stages(self) -> int:
        return len(self.stage_s)

    def times(self, plan: Plan) -> PlanTimes:
        return PlanTimes(self.stage_s, self.link_s)

    def sent(self, run: PlanRun) -> None:
        self.runs.append(run)

    def flushed(self, plan: Plan) -> None:
        pass

    def returned(self, outputs: Sequence[Output]) -> None:
        self.outputs += outputs


def run_two(fixed: Fixed, latency: ControlLatency, **settings: int) -> list[PlanRun]:
    """Two requests in batches of one, a token each."""
    config = ScheduleConfig(stages=fixed.num_stages, max_batch_size=1, **settings)
    scheduler = make_scheduler(config, num_blocks=8)
    pipeline = VirtualPipeline(scheduler, fixed, fixed, latency=latency)
    for index in (0, 1):
        request = Request(id=index, prompt=(index,), max_tokens=1)
        pipeline.at(0.0, lambda request=request: scheduler.submit(request, 0.0))  # type: ignore[misc]
    pipeline.run()
    return fixed.runs


def test_a_plan_waits_for_the_one_before_at_each_stage() -> None:
    first, second = run_two(Fixed([1.0, 3.0]), ControlLatency())
    assert (first.starts_s, first.ends_s, first.returned_s) == ([0, 1], [1, 4], 4)
    assert (second.starts_s, second.ends_s, second.returned_s) == ([1, 4], [2, 7], 7)


def test_activations_take_their_time_and_a_link_carries_one_plan_at_a_time() -> None:
    first, second = run_two(Fixed([1.0, 1.0], link_s=5.0), ControlLatency())
    assert first.starts_s == [0, 6]
    assert second.starts_s == [1, 11]
    assert second.returned_s == 12


def test_latencies_delay_the_plan_and_the_token_but_keep_no_stage_busy() -> None:
    latency = ControlLatency(plan_s=0.5, token_s=0.25)
    (first, second) = run_two(Fixed([1.0]), latency, inflight=1)
    assert (first.starts_s, first.ends_s, first.returned_s) == ([0.5], [1.5], 1.75)
    assert (second.sent_s, second.starts_s) == (1.75, [2.25])


def test_one_more_plan_in_flight_hides_the_latency() -> None:
    latency = ControlLatency(plan_s=0.5, token_s=0.25)
    (_, second) = run_two(Fixed([1.0]), latency, inflight=2)
    assert (second.sent_s, second.starts_s) == (0, [1.5])


def test_time_stops_where_it_is_told_to() -> None:
    fixed = Fixed([1.0])
    scheduler = make_scheduler(ScheduleConfig(stages=1), num_blocks=8)
    pipeline = VirtualPipeline(scheduler, fixed, fixed)
    request = Request(id=0, prompt=(1,), max_tokens=5)
    pipeline.at(2.0, lambda: scheduler.submit(request, 2.0))
    pipeline.run(until_s=4.5)
    assert pipeline.now_s == pytest.approx(4.0)
    assert len(fixed.outputs) == 2
