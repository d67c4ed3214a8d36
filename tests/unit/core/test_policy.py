"""How large a batch may be, with exact numbers."""

from __future__ import annotations

import pytest

from orca_dist.core import Forming
from orca_dist.core.policy import BatchCaps, batch_caps


def caps_of(
    forming: Forming,
    *,
    admitted: int = 0,
    prefill_tokens: int = 0,
    inflight: int = 4,
    max_batch_size: int = 32,
) -> BatchCaps:
    return batch_caps(
        forming,
        admitted=admitted,
        prefill_tokens=prefill_tokens,
        inflight=inflight,
        max_batch_size=max_batch_size,
        max_batch_tokens=2048,
        min_chunk=256,
    )


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
    [(0, 256), (1, 256), (1024, 256), (1025, 257), (4000, 1000), (8192, 2048), (9000, 2048)],
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
