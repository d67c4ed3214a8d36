"""A request's own rules: which tokens it keeps, and which of the paper's states it is in."""

from __future__ import annotations

import dataclasses

import pytest

from orca_dist.core import FinishReason, Phase, Request, Sampling
from orca_dist.core.kv import Lease
from orca_dist.core.request import Entry


def make_entry(*, max_tokens: int = 3, stop_ids: tuple[int, ...] = ()) -> Entry:
    request = Request(id=7, prompt=(1, 2), max_tokens=max_tokens, stop_ids=frozenset(stop_ids))
    return Entry(request, request.id, (0.0, 0), len(request.prompt))


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([], [], None),
        ([5], [5], None),
        ([5, 6], [5, 6], None),
        ([5, 6, 8], [5, 6, 8], FinishReason.LENGTH),
        ([5, 6, 8, 4], [5, 6, 8], FinishReason.LENGTH),
        ([9], [9], FinishReason.STOP),
        ([5, 9, 6], [5, 9], FinishReason.STOP),
        ([5, 6, 9], [5, 6, 9], FinishReason.STOP),  # the last one allowed, and a stop
        ([5, 6, 8, 9], [5, 6, 8], FinishReason.LENGTH),
        ([10, 9], [10], FinishReason.STOP),
    ],
)
def test_accept_keeps_up_to_the_token_that_ends_it(
    tokens: list[int], kept: list[int], reason: FinishReason | None
) -> None:
    entry = make_entry(stop_ids=(9, 10))
    assert entry.accept(tokens) == (kept, reason)
    assert entry.known(0, entry.known_len) == (1, 2, *kept)
    assert entry.generated == kept


def test_accept_counts_over_calls() -> None:
    entry = make_entry(max_tokens=3)
    assert entry.accept([4]) == ([4], None)
    assert entry.accept([4]) == ([4], None)
    assert entry.accept([4]) == ([4], FinishReason.LENGTH)


def test_a_stop_id_in_the_prompt_ends_nothing() -> None:
    entry = make_entry(stop_ids=(1, 2))
    assert entry.accept([5]) == ([5], None)


def test_one_token_is_the_least() -> None:
    assert make_entry(max_tokens=1).accept([4, 4]) == ([4], FinishReason.LENGTH)


def test_the_request_itself_is_never_changed() -> None:
    entry = make_entry()
    entry.accept([5])
    assert entry.request.prompt == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.request.max_tokens = 9  # type: ignore[misc]


def test_max_len_is_prompt_and_answer() -> None:
    assert make_entry(max_tokens=3).request.max_len == 5


def test_phases_follow_from_the_lengths() -> None:
    entry = make_entry()
    assert (entry.phase, entry.unscheduled_len) == (Phase.INITIATION, 2)
    entry.scheduled_len = 1
    assert (entry.phase, entry.unscheduled_len) == (Phase.INCREMENT, 1)
    entry.scheduled_len = 2
    assert (entry.phase, entry.unscheduled_len) == (Phase.RUNNING, 0)
    entry.accept([5])
    assert (entry.phase, entry.unscheduled_len) == (Phase.INCREMENT, 1)


def test_known_tokens_of_prompt_and_answer() -> None:
    entry = make_entry(max_tokens=9)
    entry.accept([5, 6, 7])
    tokens = (1, 2, 5, 6, 7)
    for start in range(6):
        for end in range(start, 6):
            assert entry.known(start, end) == tokens[start:end]


def test_rewind_keeps_the_tokens_and_what_is_in_flight() -> None:
    entry = make_entry()
    entry.accept([5])
    entry.prefill_len, entry.scheduled_len, entry.computed_len = 2, 3, 2
    entry.lease = Lease(blocks=[4, 5], room=2)
    entry.rewind()
    assert entry.known(0, 3) == (1, 2, 5)
    assert entry.phase is Phase.INITIATION
    assert (entry.scheduled_len, entry.prefill_len, entry.lease) == (0, 0, None)
    assert entry.in_flight_len == 1
    entry.computed_len += 1
    assert entry.in_flight_len == entry.computed_len == 0


def test_sampling_is_greedy_unless_told() -> None:
    assert Request(id=1, prompt=(1,), max_tokens=1).sampling == Sampling(temperature=0.0)
