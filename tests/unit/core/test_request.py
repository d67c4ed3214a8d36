"""A request's own rules: which tokens it keeps, and which of the paper's states it is in."""

from __future__ import annotations

import dataclasses

import pytest

from orca_dist.core import FinishReason, Phase, Request, Sampling
from orca_dist.core.request import Entry


def make_entry(*, max_tokens: int = 3, stop_ids: tuple[int, ...] = ()) -> Entry:
    request = Request(id=7, prompt=(1, 2), max_tokens=max_tokens, stop_ids=frozenset(stop_ids))
    return Entry(request, 0, list(request.prompt))


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
    assert entry.tokens == [1, 2, *kept]
    assert entry.num_generated == len(kept)


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


def test_rewind_keeps_the_tokens_and_nothing_else() -> None:
    entry = make_entry()
    entry.accept([5])
    entry.scheduled_len, entry.computed_len = 3, 2
    entry.blocks, entry.admitted = [4, 5], True
    entry.rewind()
    assert entry.tokens == [1, 2, 5]
    assert entry.num_generated == 1
    assert entry.phase is Phase.INITIATION
    assert (entry.scheduled_len, entry.computed_len) == (0, 0)
    assert (entry.blocks, entry.admitted) == ([], False)
    assert entry.alive


def test_sampling_is_greedy_unless_told() -> None:
    assert Request(id=1, prompt=(1,), max_tokens=1).sampling == Sampling(temperature=0.0)
