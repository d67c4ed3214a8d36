"""The scheduler's cases with their exact values, on a fake pipeline.

Reports of users of such systems, re-told as events: a stage takes a tick unless
said otherwise, a plan returns num_stages ticks later, and a request reserves
prompt + max_tokens slots of a pool with blocks of one slot. Where a report is
about a live server, its scheduler's part is here.
"""

from __future__ import annotations

import itertools
import random

import pytest

from orca_dist.core import FinishReason, Forming, Phase, Plan, PlanResult, Request
from tests.fixtures.checked_pipeline import (
    check_nothing_is_left,
    check_replay,
    make_pipeline,
    memory_of,
)
from tests.fixtures.fake_pipeline import FakePipeline, make_request

STOP = 7


# ---- S1: reservations come back, always once --------------------------------------------


def run_s1(forming: Forming) -> FakePipeline:
    rng = random.Random(20_221)
    pipeline = make_pipeline(num_stages=3, max_batch_size=4, num_slots=64, forming=forming)
    stop_at: dict[int, int] = {}  # position of the stop token
    at = 0
    for i in range(500):
        at += rng.randint(0, 11)
        prompt_len, max_tokens = rng.randint(1, 8), rng.randint(1, 16)
        stops = (STOP,) if rng.random() < 0.1 else ()
        if stops:
            stop_at[i] = prompt_len + rng.randint(0, max_tokens - 1)
        request = make_request(i, prompt_len=prompt_len, max_tokens=max_tokens, stop_ids=stops)
        pipeline.submit_at(at, request)
        if rng.random() < 0.4:
            pipeline.cancel_at(at + rng.randint(0, 50), i)
    pipeline.sample = lambda request_id, position: STOP * (position == stop_at.get(request_id))
    pipeline.run()
    return pipeline


@pytest.mark.parametrize("forming", Forming)
def test_s1_reservations_come_back_once(forming: Forming) -> None:
    pipeline = run_s1(forming)
    log, memory = pipeline.log, memory_of(pipeline)
    phases = {phase for seen in log.cancels.values() for phase in seen}
    assert phases == {Phase.INITIATION, Phase.RUNNING, Phase.INCREMENT, None}
    assert set(log.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    cancelled = {i for i, seen in log.cancels.items() if seen != [None]}
    assert set(log.ended_at) == set(range(500)) - cancelled
    assert 32 < memory.peak <= 64
    check_nothing_is_left(pipeline)
    check_replay(log)


def test_s1_the_whole_pool_is_usable_afterwards() -> None:
    pipeline = run_s1(Forming.PAPER)
    pipeline.submit_at(pipeline.now, make_request(500, prompt_len=40, max_tokens=24))
    log = pipeline.run()
    assert log.reasons[500] is FinishReason.LENGTH
    assert len(log.tokens[500]) == 24
    assert memory_of(pipeline).peak == 64
    check_nothing_is_left(pipeline)


def test_s1_second_cancel_and_late_result_change_nothing() -> None:
    pipeline = run_s1(Forming.PAPER)
    scheduler = pipeline.scheduler
    for i in range(500):
        assert scheduler.cancel(i, pipeline.now) is False
        assert scheduler.finish(i, 0, FinishReason.STOP, pipeline.now) is None
    for run in pipeline.log.runs:
        result = PlanResult(seq=run.plan.seq, ids=run.plan.ids, tokens=[[0] for _ in run.plan.ids])
        assert scheduler.on_result(result, pipeline.now) == []
    check_nothing_is_left(pipeline)


def test_s1_late_token_of_a_request_cancelled_in_flight_changes_nothing() -> None:
    pipeline = make_pipeline(num_stages=3, max_batch_size=4)
    pipeline.submit_at(0, make_request(0, max_tokens=5))
    pipeline.submit_at(0, make_request(1, max_tokens=5))
    pipeline.cancel_at(1, 0)
    log = pipeline.run()
    assert log.cancels[0] == [Phase.RUNNING]
    assert log.tokens[0] == []
    assert len(log.tokens[1]) == 5
    check_nothing_is_left(pipeline)


# ---- S2: one request, four stages; then nothing -----------------------------------------


def test_s2_one_request_alone() -> None:
    pipeline = make_pipeline(num_stages=4, max_batch_size=8)
    pipeline.submit_at(0, make_request(0, max_tokens=5))
    log = pipeline.run()
    assert log.ended_at == {0: 20}
    assert log.max_in_flight == 1
    assert log.batch_sizes == [1] * 5
    assert [run.starts_s[0] for run in log.runs] == [0, 4, 8, 12, 16]


def test_s2_eight_requests_in_four_batches() -> None:
    pipeline = make_pipeline(num_stages=4, max_batch_size=2)
    for i in range(8):
        pipeline.submit_at(0, make_request(i, prompt_len=3, max_tokens=5))
    log = pipeline.run()
    assert [log.started_at[i] for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [log.ended_at[i] for i in range(8)] == [20, 20, 21, 21, 22, 22, 23, 23]
    assert log.max_in_flight == 4
    assert log.batch_sizes == [2] * 20


def test_s2_idle_selects_nothing_and_wakes_at_once() -> None:
    """The live part (no busy spin) is the engine master's; here: nothing to do is no plan."""
    pipeline = make_pipeline(num_stages=4, max_batch_size=8)
    pipeline.submit_at(0, make_request(0, max_tokens=5))
    num_plans = len(pipeline.run().runs)
    for _ in range(10):
        assert pipeline.scheduler.select(pipeline.now) is None
        assert pipeline.scheduler.flush_drops() is None
    pipeline.submit_at(25, make_request(1, max_tokens=1))
    log = pipeline.run()
    assert len(log.runs) == num_plans + 1
    assert (log.started_at[1], log.ended_at[1]) == (25, 29)


# ---- S5: no overtaking for ever, no blocking of finished ones ---------------------------


def test_s5_strict_order() -> None:
    pipeline = make_pipeline(num_stages=2, max_batch_size=4, num_slots=20)
    a, b, c = 100, 101, range(12)
    pipeline.submit_at(0, make_request(a, prompt_len=4, max_tokens=10))
    pipeline.submit_at(1, make_request(b, prompt_len=4, max_tokens=10))
    for i in c:
        pipeline.submit_at(2 + i, make_request(i, prompt_len=1, max_tokens=2))
    log = pipeline.run()
    assert (log.started_at[a], log.ended_at[a]) == (0, 20)
    assert (log.started_at[b], log.ended_at[b]) == (20, 40)
    assert [log.started_at[i] for i in c] == [20, 20, 24, 24, 28, 28, 32, 32, 36, 36, 40, 40]
    assert all(log.ended_at[i] == log.started_at[i] + 4 for i in c)
    check_replay(log)


def test_s5_a_finished_batch_mate_leaves_at_once() -> None:
    pipeline = make_pipeline(num_stages=2, max_batch_size=4, num_slots=100)
    pipeline.submit_at(0, make_request(0, prompt_len=4, max_tokens=2))
    pipeline.submit_at(0, make_request(1, prompt_len=4, max_tokens=30))
    log = pipeline.run()
    assert log.batch_sizes == [2] * 2 + [1] * 28
    assert log.ended_at == {0: 4, 1: 60}


# ---- accounting of KV and requests ------------------------------------------------------


def test_no_block_is_lost_over_300_requests() -> None:
    """A leak of one block per request kills a server after thousands; here: checked every 50."""
    rng = random.Random(17)
    pipeline = make_pipeline(num_stages=3, max_batch_size=4, num_slots=64)
    for i in range(300):
        request = make_request(i, prompt_len=rng.randint(1, 20), max_tokens=rng.randint(1, 20))
        pipeline.submit_at(pipeline.now + rng.randint(0, 5), request)
        if i % 50 == 49:
            log = pipeline.run()
            assert len(log.ended_at) == i + 1
            check_nothing_is_left(pipeline)
    assert memory_of(pipeline).num_allocated == 300


CANCEL_TIMES = {
    "queued": (1, Phase.INITIATION),
    "in flight on stage 0": (3.5, Phase.RUNNING),
    "in flight on the last stage": (5.5, Phase.RUNNING),
    "between iterations": (6, Phase.INCREMENT),
}


@pytest.mark.parametrize("state", CANCEL_TIMES)
def test_a_cancel_works_in_every_state(state: str) -> None:
    """Request 1 (without memory until tick 3) is cancelled; 0, 2 and 3 don't notice.

    The caller's CANCELLED is the front's to send; here: it leaves once, and for good.
    """
    at, phase = CANCEL_TIMES[state]
    pipeline = make_pipeline(num_stages=3, max_batch_size=1, num_slots=10)
    pipeline.submit_at(0, make_request(9, prompt_len=1, max_tokens=1))
    for i in range(4):
        pipeline.submit_at(0.5, make_request(i, prompt_len=2, max_tokens=3))
    pipeline.cancel_at(at, 1)
    pipeline.cancel_at(at + 1, 1)
    log = pipeline.run()
    assert log.cancels[1] == [phase, None]
    assert log.started_at.get(1) == (None if state == "queued" else 3)
    assert 1 not in log.ended_at
    assert all(run.sent_s < at for run in log.runs_of(1))
    assert {i: len(log.tokens[i]) for i in (0, 2, 3)} == {0: 3, 2: 3, 3: 3}
    check_nothing_is_left(pipeline)
    check_replay(log)


@pytest.mark.parametrize("moment", ["queued", "in flight", "returned"])
def test_two_thousand_cancels_leave_nothing(moment: str) -> None:
    """Orphans of clients that left: no set of ids grows (the RSS is a live server's test)."""
    pipeline = make_pipeline(num_stages=2, max_batch_size=2, num_slots=20)
    scheduler = pipeline.scheduler
    for i in range(2000):
        scheduler.submit(make_request(i, prompt_len=4, max_tokens=4), 0.0)
        plan = None if moment == "queued" else scheduler.select(0.0)
        if moment == "returned":
            assert plan is not None
            scheduler.on_result(PlanResult(seq=plan.seq, ids=[i], tokens=[[0]]), 0.0)
        assert scheduler.cancel(i, 0.0)
        if plan and moment == "in flight":
            scheduler.on_result(PlanResult(seq=plan.seq, ids=[i], tokens=[[0]]), 0.0)
        if moment != "queued":
            drop = scheduler.flush_drops()
            assert drop is not None
            assert drop.drops == [i]
        assert scheduler.select(0.0) is None
    check_nothing_is_left(pipeline)


def test_a_pool_of_one_and_a_half_requests_serves_ten() -> None:
    """Reserving the worst case: no deadlock, no stall, nothing computed twice."""
    pipeline = make_pipeline(num_stages=2, max_batch_size=4, num_slots=15)
    for i in range(10):
        pipeline.submit_at(0, make_request(i, prompt_len=4, max_tokens=6))
    log = pipeline.run()
    assert [log.ended_at[i] for i in range(10)] == [12 * (i + 1) for i in range(10)]
    assert [log.started_at[i] for i in range(10)] == [12 * i for i in range(10)]
    returns = [0.0] + [run.returned_s for run in log.runs]
    assert all(after - before == 2 for before, after in itertools.pairwise(returns))
    for i in range(10):
        plans = [run.plan for run in log.runs_of(i)]
        assert sum(admit.id == i for plan in plans for admit in plan.admits) == 1
        assert sum(plan.lengths[plan.ids.index(i)] for plan in plans) == 4 + 6 - 1
    check_nothing_is_left(pipeline)


def test_small_requests_do_not_starve_a_large_one() -> None:
    """Pool 24: A(18) runs, B(16) waits, small ones (4) would fit beside A but came later."""
    pipeline = make_pipeline(num_stages=2, max_batch_size=4, num_slots=24)
    a, b, small = 100, 101, range(2, 40)
    pipeline.submit_at(0, make_request(a, prompt_len=4, max_tokens=14))
    pipeline.submit_at(1, make_request(b, prompt_len=4, max_tokens=12))
    for i in small:
        pipeline.submit_at(i, make_request(i, prompt_len=1, max_tokens=3))
    log = pipeline.run()
    assert log.started_at[b] == log.ended_at[a] == 28
    assert all(log.started_at[i] >= 28 for i in small)
    starts = [log.started_at[i] for i in small]
    assert starts == sorted(starts)
    check_nothing_is_left(pipeline)


# ---- recovery: a new epoch, from the known tokens ---------------------------------------


def test_restart_admits_prompt_and_answer_so_far() -> None:
    pipeline = make_pipeline(num_stages=2, max_batch_size=4)
    scheduler = pipeline.scheduler
    pipeline.sample = lambda request_id, position: 50 + position
    pipeline.submit_at(0, Request(id=0, prompt=(11, 12), max_tokens=6))
    pipeline.submit_at(1, Request(id=1, prompt=(21,), max_tokens=6))
    log = pipeline.run(until=5)
    assert log.tokens == {0: [52, 53], 1: [51, 52]}
    late = scheduler._in_flight[0].plan
    scheduler.restart(5.0)
    plan = scheduler.select(5.0)
    assert plan is not None
    assert [admit.tokens for admit in plan.admits] == [(11, 12, 52, 53), (21, 51, 52)]
    assert (plan.starts, plan.lengths, plan.new_tokens) == ([0, 0], [4, 3], [])
    result = PlanResult(seq=late.seq, ids=late.ids, tokens=[[9] for _ in late.ids])
    assert scheduler.on_result(result, 5.0) == []
    assert scheduler.plans_in_flight == 1


def run_with_fatal(culprit: int, num_requests: int) -> tuple[list[list[int]], list[str]]:
    """A stage that dies of `culprit`, on a pipeline of two; the plans' ids, and who failed."""
    pipeline = make_pipeline(num_stages=2, max_batch_size=4, chunked_prefill=True)
    scheduler = pipeline.scheduler
    for i in range(num_requests):
        scheduler.submit(make_request(i, max_tokens=2), 0.0)
    plans: list[list[int]] = []
    failures: list[str] = []
    flight: list[Plan] = []
    for _ in range(100):
        while plan := scheduler.select(0.0):
            plans.append(plan.ids)
            flight.append(plan)
        if not flight:
            break
        plan = flight.pop(0)
        if culprit in plan.ids:
            outputs = scheduler.restart(0.0, [plan.seq])
            failures += [output.message for output in outputs if output.id == culprit]
            assert all(output.id == culprit for output in outputs)
            flight.clear()
        else:
            tokens = [[5] for _ in plan.ids]
            scheduler.on_result(PlanResult(seq=plan.seq, ids=plan.ids, tokens=tokens), 0.0)
    assert not len(scheduler.pool)
    assert not scheduler._suspects
    return plans, failures


def test_suspects_run_alone_and_only_the_culprit_fails() -> None:
    plans, failures = run_with_fatal(culprit=2, num_requests=4)
    assert failures == ["a stage was lost 2 times while it computed this request alone"]
    assert plans == [[0, 1, 2, 3], [0], [0], [1], [1], [2], [2], [3], [3]]
