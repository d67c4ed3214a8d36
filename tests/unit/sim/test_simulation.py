"""Workloads through the real scheduler: exact schedules, accounting, and what is refused."""

from __future__ import annotations

import pytest

from orca_dist.config import ScheduleConfig
from orca_dist.core import Batching, MemoryKind
from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import parse_lengths
from orca_dist.sim.report import make_report, percentiles, quantile
from orca_dist.sim.simulation import Record, Setup, simulate
from orca_dist.sim.ticks import TickCost
from orca_dist.sim.workload import Arrivals, Workload, WorkloadRequest, make_workload

OUTPUT_LENS = "5,50,8,12,40,3,30,7"


def ticking(schedule: ScheduleConfig, **settings: object) -> Setup:
    cost = TickCost(num_stages=schedule.stages)
    return Setup(schedule=schedule, cost=cost, **settings)  # type: ignore[arg-type]


def closed(output_lens: str = OUTPUT_LENS, clients: int | None = None) -> Workload:
    lengths = parse_lengths("output_lens", output_lens)
    return make_workload(
        num_requests=len(lengths.listed),
        prompt_lens=parse_lengths("prompt_len", "1"),
        output_lens=lengths,
        arrivals=Arrivals(clients=clients),
        seed=0,
    )


def run_closed(batching: Batching, **settings: object) -> Record:
    schedule = ScheduleConfig(stages=1, max_batch_size=4, batching=batching)
    return simulate(ticking(schedule, **settings), closed())


@pytest.mark.parametrize("reserve_len", [None, 2048])
@pytest.mark.parametrize(
    ("batching", "num_steps", "utilization"),
    [(Batching.REQUEST, 90, 155 / 360), (Batching.ITERATION, 50, 155 / 200)],
)
def test_iteration_level_scheduling_needs_fewer_steps(
    batching: Batching, num_steps: int, utilization: float, reserve_len: int | None
) -> None:
    """However many slots the requests ask for beyond what they use."""
    record = run_closed(batching, reserve_len=reserve_len)
    report = make_report(record)
    assert record.num_entries == 155
    assert report.decode_steps == record.num_plans == num_steps
    assert report.slot_utilization == pytest.approx(utilization)
    assert record.duration_s == num_steps


def test_answers_end_where_their_batch_does_if_they_are_returned_whole() -> None:
    record = run_closed(Batching.REQUEST, whole_batches=True)
    assert list(record.ended_s) == [50] * 4 + [90] * 4
    assert record.first_token_s == record.ended_s
    alone = run_closed(Batching.REQUEST)
    assert list(alone.ended_s) == [5, 50, 8, 12, 90, 53, 80, 57]
    assert list(alone.first_token_s) == [1] * 4 + [51] * 4


def test_whole_batches_of_micro_batches_end_together_too() -> None:
    schedule = ScheduleConfig(
        stages=2, max_batch_size=4, micro_batch_size=2, batching=Batching.REQUEST
    )
    record = simulate(ticking(schedule, whole_batches=True), closed())
    assert record.max_plan_size == 2
    assert len(set(record.ended_s[:4])) == len(set(record.ended_s[4:])) == 1
    assert record.ended_s[0] <= min(record.first_token_s[4:])


def test_clients_send_the_next_request_when_one_is_answered() -> None:
    schedule = ScheduleConfig(stages=1, max_batch_size=4)
    record = simulate(ticking(schedule), closed("3,5,2,4", clients=2))
    assert list(record.arrived_s) == [0, 0, 3, 5]
    assert list(record.ended_s) == [3, 5, 5, 9]


def test_clients_wait_for_their_requests_time_too() -> None:
    requests = tuple(WorkloadRequest(id=i, prompt=1, out=2, at_s=10.0 * i) for i in range(3))
    setup = ticking(ScheduleConfig(stages=1))
    record = simulate(setup, Workload(requests=requests, clients=1))
    assert list(record.arrived_s) == [0, 10, 20]


def test_times_and_shares_of_two_stages() -> None:
    """One request alone: the stages take turns."""
    setup = ticking(ScheduleConfig(stages=2))
    requests = (WorkloadRequest(id="x", prompt=3, out=4, at_s=5.0),)
    report = make_report(simulate(setup, Workload(requests=requests)))
    assert report.throughput_req_s == pytest.approx(1 / 8)
    assert report.normalized_latency_s.p50 == pytest.approx(8 / 4)
    assert (report.ttft_s.p99, report.tpot_s.p50) == (2, 2)
    assert [stage.busy for stage in report.stages] == [0.5, 0.5]
    assert [stage.bubble for stage in report.stages] == [0.5, 0.5]


def test_a_prompt_in_chunks_has_steps_that_sample_nothing() -> None:
    schedule = ScheduleConfig(stages=1, max_batch_tokens=10, min_chunk=10)
    requests = (WorkloadRequest(id=0, prompt=35, out=2),)
    record = simulate(ticking(schedule), Workload(requests=requests))
    assert (record.num_plans, record.num_decode_plans) == (5, 2)


def test_prompts_of_the_same_length_share_nothing_but_the_same_prompts_do() -> None:
    schedule = ScheduleConfig(stages=1, max_batch_size=1, max_batch_tokens=16, min_chunk=16)

    def num_plans(*prompts: int | tuple[int, ...]) -> int:
        requests = [WorkloadRequest(id=i, prompt=p, out=1) for i, p in enumerate(prompts)]
        return simulate(ticking(schedule), Workload(requests=tuple(requests))).num_plans

    assert num_plans(64, 64) == 8
    assert num_plans((7,) * 64, (7,) * 64) == 5


def test_preemptions_are_counted() -> None:
    schedule = ScheduleConfig(
        stages=1, max_batch_size=4, block_size=1, kv_tokens=40, memory=MemoryKind.PAGED
    )
    report = make_report(simulate(ticking(schedule), closed("30,30,30,30")))
    assert report.preemptions > 0


@pytest.mark.parametrize(
    ("request_", "settings", "message"),
    [
        (WorkloadRequest(id=4, prompt="text", out=1), {}, "request 4: its prompt is a text"),
        (WorkloadRequest(id=0, prompt=90, out=20), {"kv_tokens": 100}, "longest request needs 110"),
    ],
)
def test_what_can_not_be_simulated_is_refused(
    request_: WorkloadRequest, settings: dict[str, int], message: str
) -> None:
    schedule = ScheduleConfig(stages=1, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        simulate(ticking(schedule), Workload(requests=(request_,)))


def test_quantiles_lie_between_the_values_around_them() -> None:
    assert percentiles(range(101)).p90 == 90
    assert quantile([1.0, 3.0], 0.5) == 2
    assert quantile([5.0], 0.99) == 5
    assert percentiles([]).p50 is None
