"""Batching policies, chunks, prefixes, priority and deadlines in cases with exact values.

On a fake pipeline: a stage takes a tick unless said otherwise, and a plan returns
num_stages ticks later.
"""

from __future__ import annotations

import itertools

import pytest

from orca_dist.core import (
    Batching,
    FinishReason,
    MemoryKind,
    PlanResult,
    Request,
    TooLate,
)
from tests.fixtures.checked_pipeline import (
    check_nothing_is_left,
    check_replay,
    make_pipeline,
    memory_of,
)
from tests.fixtures.fake_pipeline import FakePipeline, Log, make_request

# ---- iteration-level against request-level scheduling (Orca §3, figure 3) ---------------

OUTPUT_LENS = [5, 50, 8, 12, 40, 3, 30, 7]


@pytest.mark.parametrize(
    ("batching", "num_steps", "percent_busy"),
    [(Batching.REQUEST, 90, 43), (Batching.DYNAMIC, 90, 43), (Batching.ITERATION, 50, 78)],
)
def test_eight_answers_four_at_a_time(
    batching: Batching, num_steps: int, percent_busy: int
) -> None:
    pipeline = make_pipeline(num_stages=1, max_batch_size=4, batching=batching)
    for i, max_tokens in enumerate(OUTPUT_LENS):
        pipeline.submit_at(0, make_request(i, max_tokens=max_tokens))
    log = pipeline.run()
    assert len(log.runs) == num_steps
    assert round(100 * sum(log.batch_sizes) / (4 * num_steps)) == percent_busy
    check_nothing_is_left(pipeline)
    check_replay(log)


def test_request_level_feeds_long_prompts_a_token_an_iteration() -> None:
    """The first iteration takes the shortest prompt's three tokens of each; then one each."""
    pipeline = make_pipeline(num_stages=1, max_batch_size=4, batching=Batching.REQUEST)
    for i, prompt_len in enumerate([5, 3, 4]):
        pipeline.submit_at(0, make_request(i, prompt_len=prompt_len, max_tokens=2))
    log = pipeline.run()
    assert [run.plan.lengths for run in log.runs] == [[3, 3, 3], [1, 1, 1], [1, 1], [1]]
    assert [run.plan.samples for run in log.runs] == [
        [False, True, False],
        [False, True, True],
        [True, True],
        [True],
    ]
    assert log.ended_at == {1: 2, 2: 3, 0: 4}


def test_micro_batches_fill_the_pipeline() -> None:
    pipeline = make_pipeline(
        num_stages=2, max_batch_size=4, batching=Batching.REQUEST, micro_batch_size=2
    )
    for i in range(8):
        pipeline.submit_at(0, make_request(i, max_tokens=3))
    log = pipeline.run()
    assert log.max_in_flight == 2
    assert set(log.batch_sizes) == {2}
    assert [log.started_at[i] for i in range(8)] == [0, 0, 1, 1, 7, 7, 8, 8]


def test_dynamic_batching_waits_for_company() -> None:
    pipeline = make_pipeline(
        num_stages=1, max_batch_size=4, batching=Batching.DYNAMIC, batch_window_s=5.0
    )
    pipeline.submit_at(0, make_request(0, max_tokens=2))
    pipeline.submit_at(3, make_request(1, max_tokens=2))
    for i in range(2, 6):
        pipeline.submit_at(8, make_request(i, max_tokens=1))
    log = pipeline.run()
    assert [log.started_at[i] for i in range(6)] == [5, 5, 8, 8, 8, 8]


# ---- a prompt in chunks -------------------------------------------------------------------


def run_long_prompt(num_stages: int, **settings: object) -> tuple[FakePipeline, Log]:
    pipeline = make_pipeline(
        num_stages=num_stages,
        max_batch_size=8,
        max_batch_tokens=256,
        memory=MemoryKind.PAGED,
        block_size=16,
        **({"chunked_prefill": True} | settings),
    )
    pipeline.submit_at(0, make_request(0, prompt_len=2048, max_tokens=1))
    return pipeline, pipeline.run()


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_chunks_follow_each_other_through_the_pipeline(num_stages: int) -> None:
    """8 chunks: the first token is there after 8 + (stages - 1) ticks, not 8 x stages."""
    _, log = run_long_prompt(num_stages)
    assert [run.plan.lengths for run in log.runs] == [[256]] * 8
    assert [run.plan.samples for run in log.runs] == [[False]] * 7 + [[True]]
    assert log.ended_at == {0: 8 + num_stages - 1}
    _, log = run_long_prompt(num_stages, chunk_overlap=False)
    assert log.ended_at == {0: 8 * num_stages}


def test_decodes_ride_along_with_the_chunks_of_a_prompt() -> None:
    """Nobody waits for a long prompt: each plan has room for a chunk and for others' tokens."""
    pipeline = make_pipeline(
        num_stages=2, max_batch_size=8, max_batch_tokens=64, chunked_prefill=True
    )
    pipeline.service_time = lambda plan: plan.num_tokens
    pipeline.submit_at(0, make_request(0, max_tokens=60))
    pipeline.submit_at(10, make_request(1, prompt_len=2000, max_tokens=2))
    log = pipeline.run()
    assert max(run.plan.num_tokens for run in log.runs) <= 64
    returns = [run.returned_s for run in log.runs_of(0)]
    gaps = [after - before for before, after in itertools.pairwise(returns)]
    assert max(gaps) <= 4 * 64, "at most the chunks that are in the pipeline before it"
    check_replay(log)


def test_a_chunked_prompt_that_is_cancelled_leaves_nothing() -> None:
    pipeline = make_pipeline(
        num_stages=4, max_batch_size=8, max_batch_tokens=16, chunked_prefill=True
    )
    pipeline.submit_at(0, make_request(0, prompt_len=200, max_tokens=5))
    pipeline.cancel_at(6.5, 0)
    log = pipeline.run()
    assert max(run.sent_s for run in log.runs) < 6.5
    check_nothing_is_left(pipeline)
    check_replay(log)


# ---- what is shared, and what is computed again -----------------------------------------


def test_a_second_turn_computes_only_what_is_new() -> None:
    pipeline = make_pipeline(
        num_stages=2, max_batch_size=4, memory=MemoryKind.PAGED, block_size=16, num_slots=6400
    )
    pipeline.sample = lambda request_id, position: position + 1  # the answer counts on
    pipeline.submit_at(0, make_request(0, prompt_len=100, max_tokens=60))
    pipeline.submit_at(500, make_request(1, prompt_len=190, max_tokens=2))
    log = pipeline.run()
    second = log.runs_of(1)[0].plan
    assert (second.starts, second.lengths) == ([144], [46]), "159 were computed: 9 whole blocks"
    check_replay(log, block_size=16)
    check_nothing_is_left(pipeline)


def test_a_burst_with_one_system_prompt_computes_it_once() -> None:
    """All are admitted before any has run; those after the first share its blocks at once."""
    pipeline = make_pipeline(
        num_stages=2, max_batch_size=8, memory=MemoryKind.PAGED, block_size=16, num_slots=6400
    )
    for i in range(8):
        prompt = (*range(1, 161), 1000 + i, 2000 + i)
        pipeline.submit_at(0, Request(id=i, prompt=prompt, max_tokens=3))
    log = pipeline.run()
    assert log.runs[0].plan.lengths == [162] + [2] * 7
    assert memory_of(pipeline).num_shared == 7 * 10
    check_replay(log, block_size=16)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_memory_that_runs_out_preempts_the_newest(num_stages: int) -> None:
    """Room for 1.5 of them: all end, in order, with the tokens that they have alone."""
    pipeline = make_pipeline(
        num_stages=num_stages, max_batch_size=8, memory=MemoryKind.PAGED, num_slots=60
    )
    pipeline.sample = lambda request_id, position: 100 * request_id + position
    for i in range(6):
        pipeline.submit_at(0, make_request(i, prompt_len=10, max_tokens=30, first_token=50 * i + 1))
    log = pipeline.run()
    assert pipeline.scheduler.num_preempted > 0
    for i in range(6):
        assert log.tokens[i] == [100 * i + position for position in range(10, 40)]
    assert list(log.ended_at.values()) == sorted(log.ended_at.values())
    check_replay(log)
    check_nothing_is_left(pipeline)


# ---- priority and deadlines ------------------------------------------------------------------


def run_flood(priority: int, *, ageing_s: float = 10.0) -> Log:
    """One request of priority 0 among a flood of others that never lets up for 100 ticks."""
    pipeline = make_pipeline(num_stages=1, max_batch_size=1, ageing_s=ageing_s)
    pipeline.submit_at(0, make_request(1000, max_tokens=1, priority=priority))
    for i in range(100):
        pipeline.submit_at(i, make_request(i, max_tokens=1, priority=priority))
    pipeline.submit_at(0.5, make_request(2000, max_tokens=1))
    return pipeline.run()


@pytest.mark.parametrize("lead", [1, 2, 5])
def test_ageing_bounds_what_passes_a_request(lead: int) -> None:
    """Passed only by those that arrive less than lead x ageing_s after it: the formula exactly."""
    log = run_flood(lead)
    passed_by = {i for i in range(100) if log.started_at[i] < log.started_at[2000]}
    assert passed_by == {i for i in range(100) if i < 0.5 + 10 * lead}


def test_without_priorities_it_is_first_come_first_served() -> None:
    log = run_flood(0)
    assert log.started_at[2000] == 2


def test_a_deadline_passes_in_the_queue_and_in_the_middle() -> None:
    pipeline = make_pipeline(num_stages=2, max_batch_size=1)
    pipeline.submit_at(0, make_request(0, max_tokens=50, deadline_s=30.5))
    pipeline.submit_at(0, make_request(1, max_tokens=50))
    pipeline.submit_at(0, make_request(2, max_tokens=50, deadline_s=10.25))
    log = pipeline.run()
    assert log.reasons[0] is log.reasons[2] is FinishReason.DEADLINE
    assert (log.ended_at[0], log.ended_at[2]) == (30.5, 10.25)
    assert len(log.tokens[0]) == 15
    assert max(run.sent_s for run in log.runs_of(0)) <= 30.5
    assert not log.runs_of(2)
    assert log.reasons[1] is FinishReason.LENGTH
    check_nothing_is_left(pipeline)


def test_what_can_not_end_in_time_is_refused_if_wanted() -> None:
    """At the pace of late, 2 ticks a token, 50 tokens take 100 ticks."""
    pipeline = make_pipeline(num_stages=2, max_batch_size=1, refuse_late=True)
    pipeline.submit_at(0, make_request(0, max_tokens=200))
    pipeline.run()
    scheduler, now = pipeline.scheduler, pipeline.now
    assert scheduler.round_trip_s == pytest.approx(2.0)
    with pytest.raises(TooLate, match=r"needs at least 100 s, its deadline is in 90 s"):
        scheduler.submit(make_request(1, max_tokens=50, deadline_s=now + 90), now)
    scheduler.submit(make_request(2, max_tokens=50, deadline_s=now + 101), now)
    assert len(scheduler.pool) == 1


def test_the_waiting_let_the_running_go_on_for_a_while() -> None:
    """waiting_served_ratio 2: the one that waits beside one that runs is let in after 5 plans."""
    pipeline = make_pipeline(
        num_stages=1, max_batch_size=4, waiting_served_ratio=2.0, max_waiting_iterations=5
    )
    pipeline.submit_at(0, make_request(0, max_tokens=40))
    pipeline.submit_at(9.5, make_request(1, max_tokens=3))
    log = pipeline.run()
    assert log.started_at[1] == 15


# ---- logits of what is computed again ----------------------------------------------------------


def test_logits_go_out_once_for_every_position() -> None:
    """Chunks bring theirs, and what is computed again after a restart does not come twice."""
    pipeline = make_pipeline(
        num_stages=1, max_batch_size=1, max_batch_tokens=4, chunked_prefill=True
    )
    scheduler, rows = pipeline.scheduler, b""

    def step() -> bytes:
        plan = scheduler.select(0.0)
        assert plan is not None
        ids = [0] if plan.samples[0] else []
        start, length = plan.starts[0], plan.lengths[0]
        logits = {0: bytes(range(start, start + length))}
        result = PlanResult(seq=plan.seq, ids=ids, tokens=[[7]] * len(ids), logits=logits)
        return b"".join(output.logits for output in scheduler.on_result(result, 0.0))

    scheduler.submit(make_request(0, prompt_len=6, max_tokens=4), 0.0)
    rows += step() + step() + step()
    assert rows == bytes(range(7))
    scheduler.restart(0.0)
    rows += step() + step() + step()
    assert rows == bytes(range(9))


def test_a_window_that_is_over_wakes_nobody_again() -> None:
    """A batch that can't start yet waits for a return, not for its window: no spinning."""
    pipeline = make_pipeline(
        num_stages=1, max_batch_size=2, batching=Batching.DYNAMIC, batch_window_s=5.0
    )
    scheduler = pipeline.scheduler
    scheduler.submit(make_request(0, max_tokens=9), 0.0)
    assert scheduler.next_wakeup() == 5.0
    plan = scheduler.select(5.0)
    assert plan is not None
    scheduler.cancel(0, 5.5)
    scheduler.submit(make_request(1, max_tokens=9), 6.0)
    assert scheduler.select(12.0) is None, "a plan is in flight"
    assert scheduler.next_wakeup() is None
    scheduler.on_result(PlanResult(seq=plan.seq, ids=[0], tokens=[[7]]), 13.0)
    assert scheduler.select(13.0) is not None
