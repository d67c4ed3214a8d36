"""How batches are formed, in cases: a full pipeline, and nobody shut out.

Reports of idle stages and of requests that wait for others, re-told as events on
a fake pipeline; a stage takes a tick unless said otherwise.
"""

from __future__ import annotations

import pytest

from orca_dist.core import Forming
from tests.fixtures.checked_pipeline import make_pipeline
from tests.fixtures.fake_pipeline import Log, affine, make_request

# ---- the burst: 64 requests, 0.5 ms apart, on 4 stages of 10 + 0.3 x batch ms ----------


def run_burst(forming: Forming) -> Log:
    pipeline = make_pipeline(num_stages=4, max_batch_size=64, forming=forming)
    pipeline.service_time = affine(10.0, 0.3)
    for i in range(64):
        pipeline.submit_at(0.5 * i, make_request(i, max_tokens=30))
    return pipeline.run()


def busy_shares(log: Log) -> list[float]:
    """Of each stage, from the second round trip on until the first request ends."""
    since, until = log.runs[7].returned_s, min(log.ended_at.values())
    assert until > since
    return [log.busy_share(stage, since, until) for stage in range(4)]


def steady_batch_sizes(log: Log) -> list[int]:
    """After one round trip, until the first request ends."""
    until = min(log.ended_at.values())
    return [len(run.plan.ids) for run in log.runs[4:] if run.sent_s < until]


def test_burst_is_shared_out_over_the_stages() -> None:
    log = run_burst(Forming.BALANCED)
    sizes = steady_batch_sizes(log)
    assert len(sizes) > 100
    assert max(sizes) - min(sizes) <= 1
    assert all(share >= 0.95 for share in busy_shares(log))


def test_burst_by_the_papers_rule_leaves_stages_idle() -> None:
    """The pathology that `balanced` is there for: 61, 1, 1, 1 for ever."""
    log = run_burst(Forming.PAPER)
    sizes = steady_batch_sizes(log)
    assert sizes[:4] == [61, 1, 1, 1]
    assert sorted(set(sizes)) == [1, 61]
    assert all(0.45 < share < 0.60 for share in busy_shares(log))


# ---- pipeline efficiency: "one batch in flight, the other stages idle" ------------------


@pytest.mark.parametrize(
    ("forming", "max_batch_size", "num_in_flight"),
    [
        (Forming.PAPER, 2, 4),
        (Forming.BALANCED, 2, 4),
        (Forming.BALANCED, 8, 4),
        (Forming.PAPER, 8, 1),  # the documented price of the paper's rule
    ],
)
def test_eight_requests_fill_the_pipeline(
    forming: Forming, max_batch_size: int, num_in_flight: int
) -> None:
    pipeline = make_pipeline(num_stages=4, max_batch_size=max_batch_size, forming=forming)
    for i in range(8):
        pipeline.submit_at(0, make_request(i, prompt_len=3, max_tokens=12))
    log = pipeline.run()
    until = min(log.ended_at.values())
    assert {num for at, num in log.in_flight if at < until} == {num_in_flight}
    assert set(log.batch_sizes) == {8 // num_in_flight}


# ---- nobody waits for a stranger's end ---------------------------------------------------


@pytest.mark.parametrize("forming", Forming)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_short_request_does_not_wait_for_a_long_one(forming: Forming, num_stages: int) -> None:
    pipeline = make_pipeline(num_stages=num_stages, max_batch_size=8, forming=forming)
    pipeline.submit_at(0, make_request(0, prompt_len=4, max_tokens=200))
    pipeline.submit_at(50, make_request(1, prompt_len=4, max_tokens=3))
    log = pipeline.run()
    latency = {i: log.ended_at[i] - log.submitted_at[i] for i in (0, 1)}
    assert latency[0] >= 50 * latency[1]
    assert len(log.tokens[1]) == 3


# ---- a prompt that is larger than its share of a batch still gets its turn --------------


def run_long_prompt(
    forming: Forming, *, num_stages: int, prompt_len: int, max_batch_tokens: int
) -> Log:
    """One stream per place in the pipeline decodes for long; then a long prompt, then a short."""
    pipeline = make_pipeline(
        num_stages=num_stages,
        max_batch_size=8,
        forming=forming,
        max_batch_tokens=max_batch_tokens,
    )
    for i in range(num_stages):
        pipeline.submit_at(i, make_request(i, max_tokens=400))
    pipeline.submit_at(50, make_request(100, prompt_len=prompt_len, max_tokens=4))
    pipeline.submit_at(50, make_request(101, max_tokens=4))
    return pipeline.run()


def check_it_ran_within_two_round_trips(log: Log, num_stages: int) -> None:
    assert log.started_at[100] <= 50 + 2 * num_stages
    assert log.started_at[101] <= 50 + 2 * num_stages
    assert min(log.ended_at[i] for i in range(num_stages)) > log.ended_at[100]


@pytest.mark.parametrize("forming", Forming)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_prompt_above_the_prefill_share_runs_soon(forming: Forming, num_stages: int) -> None:
    log = run_long_prompt(forming, num_stages=num_stages, prompt_len=1000, max_batch_tokens=2048)
    check_it_ran_within_two_round_trips(log, num_stages)


@pytest.mark.parametrize("forming", Forming)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_prompt_above_max_batch_tokens_runs_soon(forming: Forming, num_stages: int) -> None:
    log = run_long_prompt(forming, num_stages=num_stages, prompt_len=1000, max_batch_tokens=256)
    check_it_ran_within_two_round_trips(log, num_stages)
