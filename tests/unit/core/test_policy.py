"""How large a batch may be, with exact numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orca_dist.core import Batching, Forming, SchedulerConfig
from orca_dist.core.policy import BatchCaps, Load, Policy, make_policy


def policy_of(batching: Batching = Batching.ITERATION, **settings: object) -> Policy:
    defaults: dict[str, object] = {"inflight": 4, "max_batch_size": 32, "max_batch_tokens": 2048}
    return make_policy(SchedulerConfig(batching=batching, **(defaults | settings)))  # type: ignore[arg-type]


def load(
    *, waiting: int = 0, admitted: int = 0, prefill_tokens: int = 0, since_s: float = 0.0
) -> Load:
    return Load(
        waiting=waiting,
        admitted=admitted,
        prefill_tokens=prefill_tokens,
        head_since_s=since_s,
        head_waited=0,
    )


def caps_of(
    forming: Forming, *, admitted: int = 0, prefill_tokens: int = 0, inflight: int = 4
) -> BatchCaps:
    policy = policy_of(forming=forming, inflight=inflight)
    return policy.caps(load(admitted=admitted, prefill_tokens=prefill_tokens))


@pytest.mark.parametrize(("admitted", "prefill_tokens"), [(0, 0), (1, 9), (64, 9000)])
def test_paper_fills_up_whatever_is_there(admitted: int, prefill_tokens: int) -> None:
    caps = caps_of(Forming.PAPER, admitted=admitted, prefill_tokens=prefill_tokens)
    assert caps == BatchCaps(32, 2048)


@pytest.mark.parametrize(
    ("admitted", "num_requests"),
    [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (63, 16), (64, 16), (65, 17), (128, 32), (129, 32)],
)
def test_balanced_shares_the_requests_out(admitted: int, num_requests: int) -> None:
    assert caps_of(Forming.BALANCED, admitted=admitted).num_requests == num_requests


@pytest.mark.parametrize(
    ("prefill", "share"),
    [(0, 256), (1, 256), (1792, 256), (1793, 257), (7000, 1000), (14336, 2048), (18000, 2048)],
)
def test_balanced_shares_the_prompt_tokens_out(prefill: int, share: int) -> None:
    caps = caps_of(Forming.BALANCED, admitted=9, prefill_tokens=prefill)
    assert caps.prefill_tokens == share


def test_balanced_on_one_stage_is_the_papers_rule_up_to_the_caps() -> None:
    caps = caps_of(Forming.BALANCED, admitted=40, prefill_tokens=9000, inflight=1)
    assert caps == caps_of(Forming.PAPER, admitted=40, prefill_tokens=9000, inflight=1)


def test_shares_cover_all_admitted_requests() -> None:
    """One round trip of full batches leaves nobody out: inflight shares make the whole."""
    for inflight in range(1, 9):
        for admitted in range(1, 32 * inflight + 1):
            caps = caps_of(Forming.BALANCED, admitted=admitted, inflight=inflight)
            assert admitted <= caps.num_requests * inflight < admitted + inflight


# ---- prompts in chunks ----------------------------------------------------------------


def test_a_chunk_is_what_the_budget_leaves() -> None:
    policy = policy_of(chunked_prefill=True)
    assert policy.chunk(0, 1000, 300, first_prompt=True) == 300
    assert policy.chunk(300, 700, 800, first_prompt=False) == 700


def test_whole_prompts_fit_or_come_first() -> None:
    policy = policy_of(chunked_prefill=False)
    assert policy.chunk(0, 1000, 300, first_prompt=True) == 1000
    assert policy.chunk(0, 1000, 300, first_prompt=False) == 0
    assert policy.chunk(0, 300, 300, first_prompt=False) == 300


# ---- who may join ---------------------------------------------------------------------


def test_iteration_admits_a_full_batch_for_every_place_in_the_pipeline() -> None:
    assert policy_of().admissions(load(waiting=500, admitted=100), 0.0) == 28


@pytest.mark.parametrize(
    ("waiting", "admitted", "waited", "num"),
    [(11, 10, 0, 0), (12, 10, 0, 118), (1, 10, 20, 118), (1, 0, 0, 128)],
)
def test_waiting_served_ratio(waiting: int, admitted: int, waited: int, num: int) -> None:
    """1.2: twelve must wait before ten are interrupted, or someone for 20 plans."""
    policy = policy_of(waiting_served_ratio=1.2, max_waiting_iterations=20)
    counts = replace(load(waiting=waiting, admitted=admitted), head_waited=waited)
    assert policy.admissions(counts, 0.0) == num


@pytest.mark.parametrize("batching", [Batching.REQUEST, Batching.DYNAMIC])
def test_a_batch_stays_together(batching: Batching) -> None:
    policy = policy_of(batching)
    assert policy.admissions(load(waiting=40, admitted=1), 100.0) == 0
    assert policy.admissions(load(waiting=40), 100.0) == 32


def test_dynamic_waits_for_its_window_or_a_full_batch() -> None:
    policy = policy_of(Batching.DYNAMIC, batch_window_s=0.5)
    waits = load(waiting=3, since_s=10.0)
    assert policy.admissions(waits, 10.4) == 0
    assert policy.wakeup_s(waits) == 10.5
    assert policy.admissions(waits, 10.5) == 32
    assert policy.admissions(load(waiting=32, since_s=10.0), 10.1) == 32
    assert policy.wakeup_s(load(waiting=3, admitted=1)) is None
    assert policy.wakeup_s(load()) is None


def test_request_level_takes_micro_batches_and_the_shortest_prompt_first() -> None:
    policy = policy_of(Batching.REQUEST, micro_batch_size=8)
    policy.joined([5, 3, 9])
    assert policy.caps(load(admitted=32)) == BatchCaps(8, 2048)
    assert [policy.chunk(0, left, 2048, first_prompt=True) for left in (5, 3, 9)] == [3, 3, 3]
    assert policy.chunk(3, 2, 2048, first_prompt=True) == 1
    assert policy.chunk(8, 1, 2048, first_prompt=True) == 1
    assert policy.overlap is False
