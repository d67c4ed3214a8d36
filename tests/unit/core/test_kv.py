"""Reserve memory: whole blocks, each with one holder, returned in full and once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_dist.core import NeverFits, ReserveMemory
from tests.fixtures.tracked_memory import tracked_reserve


def test_slots_are_rounded_up_to_blocks() -> None:
    memory = ReserveMemory(num_blocks=4, block_size=16)
    assert (memory.capacity, memory.used) == (64, 0)
    assert len(memory.allocate(1, 16) or []) == 1
    assert len(memory.allocate(2, 17) or []) == 2
    assert memory.used == 48
    assert len(memory.allocate(3, 1) or []) == 1
    assert memory.used == 64


def test_same_calls_give_the_same_blocks_lowest_first() -> None:
    """Plans must not depend on anything but the events."""
    runs = []
    for _ in range(2):
        memory = ReserveMemory(num_blocks=4, block_size=1)
        first, second = memory.allocate(1, 2), memory.allocate(2, 2)
        memory.release(1)
        runs.append((first, second, memory.allocate(3, 2)))
    assert runs[0] == runs[1]
    first, second, again = runs[0]
    assert sorted(first or []) == [0, 1]
    assert sorted(second or []) == [2, 3]
    assert sorted(again or []) == [0, 1]


def test_no_room_is_none_and_takes_nothing() -> None:
    memory = ReserveMemory(num_blocks=3, block_size=2)
    assert memory.allocate(1, 4) is not None
    assert memory.allocate(2, 3) is None
    assert memory.used == 4
    assert memory.allocate(2, 2) is not None
    assert memory.allocate(3, 1) is None
    memory.release(1)
    assert memory.allocate(3, 4) is not None


def test_all_of_it_fits_and_one_slot_more_never_does() -> None:
    memory = ReserveMemory(num_blocks=3, block_size=2)
    with pytest.raises(NeverFits, match=r"^needs 7 KV slots, the pipeline has 6$") as refusal:
        memory.allocate(1, 7)
    assert (refusal.value.needed, refusal.value.capacity) == (7, 6)
    assert memory.used == 0
    assert sorted(memory.allocate(1, 6) or []) == [0, 1, 2]


def test_a_second_release_is_an_error() -> None:
    memory = ReserveMemory(num_blocks=3, block_size=2)
    memory.allocate(1, 4)
    memory.release(1)
    with pytest.raises(KeyError):
        memory.release(1)
    assert memory.used == 0


def test_reserving_twice_is_an_error() -> None:
    memory = ReserveMemory(num_blocks=3, block_size=2)
    memory.allocate(1, 2)
    with pytest.raises(AssertionError, match="request 1 reserves twice"):
        memory.allocate(1, 2)


def test_reset_frees_all_and_forgets_the_holders() -> None:
    memory = ReserveMemory(num_blocks=3, block_size=2)
    memory.allocate(1, 2)
    memory.allocate(2, 4)
    memory.reset()
    assert memory.used == 0
    with pytest.raises(KeyError):
        memory.release(1)
    assert sorted(memory.allocate(1, 6) or []) == [0, 1, 2]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 40)),
        st.tuples(st.just("release"), st.integers(0, 99)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), operations=OPERATIONS)
def test_any_order_of_calls_keeps_the_account(
    num_blocks: int, block_size: int, operations: list[tuple[str, int]]
) -> None:
    """TrackedMemory checks after every call: bounds, disjoint blocks, no needless refusal."""
    memory = tracked_reserve(num_blocks=num_blocks, block_size=block_size)
    for request_id, (name, value) in enumerate(operations):
        if name == "reset":
            memory.reset()
            assert memory.used == 0
        elif name == "release" and memory.held:
            memory.release(sorted(memory.held)[value % len(memory.held)])
        elif name == "allocate" and value <= memory.capacity:
            memory.allocate(request_id, value)
        elif name == "allocate":
            with pytest.raises(NeverFits):
                memory.allocate(request_id, value)
    for request_id in sorted(memory.held):
        memory.release(request_id)
    assert memory.used == 0
    assert sorted(memory.allocate(-1, memory.capacity) or []) == list(range(num_blocks))
