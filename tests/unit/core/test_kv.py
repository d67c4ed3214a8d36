"""Both kinds of memory: whole blocks, returned in full and once; what paged memory shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_dist.core import Memory, MemoryKind, PagedMemory, ReserveMemory
from orca_dist.core.kv import Lease
from tests.fixtures.tracked_memory import tracked

MakeMemory = Callable[..., Memory]


class Tokens:
    """Stands for an entry of the pool: its `known` gives tokens."""

    def __init__(self, id: int, tokens: Sequence[int]) -> None:
        self.id = id
        self.tokens = tuple(tokens)

    def known(self, start: int, end: int) -> tuple[int, ...]:
        return self.tokens[start:end]


def allocate(
    memory: Memory, tokens: Sequence[int], max_len: int | None = None, *, id: int = 0
) -> Lease | None:
    entry = Tokens(id, tokens)
    return memory.allocate(entry.known, len(tokens), max_len or len(tokens), len(tokens) - 1)


def allocated(memory: Memory, tokens: Sequence[int], max_len: int | None = None) -> Lease:
    lease = allocate(memory, tokens, max_len)
    assert lease is not None
    return lease


def computed(memory: Memory, tokens: Sequence[int]) -> Lease:
    """A request whose tokens are all in plans that were sent."""
    lease = allocated(memory, tokens)
    memory.publish(lease, Tokens(0, tokens).known, len(tokens))
    return lease


# ---- both kinds ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [PagedMemory, ReserveMemory])
def test_slots_are_rounded_up_to_blocks(make: MakeMemory) -> None:
    memory = make(num_blocks=4, block_size=16)
    assert (memory.capacity, memory.used, memory.num_free) == (64, 0, 4)
    assert len(allocated(memory, range(16)).blocks) == 1
    lease = allocated(memory, range(100, 117))
    assert (len(lease.blocks), lease.room) == (2, 32)
    assert memory.used == 48
    assert len(allocated(memory, [7]).blocks) == 1
    assert (memory.used, memory.num_free) == (64, 0)


@pytest.mark.parametrize("make", [PagedMemory, ReserveMemory])
def test_same_calls_give_the_same_blocks_lowest_first(make: MakeMemory) -> None:
    """Plans must not depend on anything but the events."""
    runs = []
    for _ in range(2):
        memory = make(num_blocks=4, block_size=1)
        first, second = allocated(memory, [1, 2]), allocated(memory, [3, 4])
        blocks = [*first.blocks], [*second.blocks]
        memory.release(first)
        runs.append((*blocks, allocated(memory, [5, 6]).blocks))
    assert runs[0] == runs[1]
    assert [sorted(blocks) for blocks in runs[0]] == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("make", [PagedMemory, ReserveMemory])
def test_no_room_is_none_and_takes_nothing(make: MakeMemory) -> None:
    memory = make(num_blocks=3, block_size=2)
    first = allocated(memory, [1, 2, 3, 4])
    assert allocate(memory, [5, 6, 7]) is None
    assert memory.used == 4
    assert allocate(memory, [5, 6]) is not None
    assert allocate(memory, [8]) is None
    memory.release(first)
    assert sorted(allocated(memory, [8, 9, 8, 9]).blocks) == [0, 1]


@pytest.mark.parametrize("make", [PagedMemory, ReserveMemory])
def test_a_second_release_is_an_error(make: MakeMemory) -> None:
    memory = make(num_blocks=3, block_size=2)
    lease = allocated(memory, range(4))
    memory.release(lease)
    with pytest.raises(AssertionError, match="a lease ends once"):
        memory.release(lease)
    assert memory.used == 0


@pytest.mark.parametrize("make", [PagedMemory, ReserveMemory])
def test_reset_frees_all_and_forgets_what_was_computed(make: MakeMemory) -> None:
    memory = make(num_blocks=3, block_size=2)
    computed(memory, [1, 2, 3, 4])
    memory.reset()
    assert (memory.used, memory.num_free) == (0, 3)
    lease = allocated(memory, [1, 2, 3, 4, 5, 6])
    assert sorted(lease.blocks) == [0, 1, 2]
    assert lease.cached_len == 0


# ---- when slots are taken ----------------------------------------------------------------


def test_reserve_takes_the_worst_case_at_once() -> None:
    memory = ReserveMemory(num_blocks=10, block_size=2)
    lease = allocated(memory, [1, 2, 3], max_len=9)
    assert (len(lease.blocks), lease.room, memory.used) == (5, 10, 10)
    with pytest.raises(AssertionError, match="11 slots asked for, 10 were reserved"):
        memory.extend(lease, 11)


def test_paged_takes_what_is_known_and_grows() -> None:
    memory = PagedMemory(num_blocks=4, block_size=2)
    lease = allocated(memory, [1, 2, 3], max_len=8)
    assert (lease.blocks, lease.room) == ([0, 1], 4)
    assert memory.extend(lease, 5) == [2]
    assert (lease.blocks, lease.room) == ([0, 1, 2], 6)
    assert memory.extend(lease, 8) == [3]
    assert memory.extend(lease, 9) is None
    assert (lease.blocks, memory.num_free) == ([0, 1, 2, 3], 0)


def test_the_watermark_is_kept_for_those_that_run() -> None:
    """Of 200 blocks 2 stay free at an admission; the only request may have all."""
    memory = PagedMemory(num_blocks=200, block_size=1)
    whole = allocated(memory, range(200))
    memory.release(whole)
    first = allocated(memory, range(1000, 1100))
    assert allocate(memory, range(2000, 2099)) is None
    assert allocate(memory, range(2000, 2098)) is not None
    assert memory.extend(first, 102) is not None
    assert memory.num_free == 0


# ---- what is shared -----------------------------------------------------------------------


def test_a_second_turn_finds_the_first() -> None:
    """Whole blocks of prompt and answer, however the first turn ended."""
    memory = PagedMemory(num_blocks=9, block_size=2)
    first = computed(memory, [1, 2, 3, 4, 5])
    blocks = [*first.blocks]
    memory.release(first)
    second = allocated(memory, [1, 2, 3, 4, 5, 6, 7])
    assert second.cached_len == 4
    assert second.blocks[:2] == blocks[:2]
    assert memory.used == 8


def test_the_last_known_token_is_never_shared() -> None:
    """It has to be computed, as it samples."""
    memory = PagedMemory(num_blocks=9, block_size=2)
    computed(memory, [1, 2, 3, 4])
    assert allocated(memory, [1, 2, 3, 4]).cached_len == 2
    assert allocated(memory, [1, 2, 3, 4, 5]).cached_len == 4


def test_only_the_same_prefix_is_shared() -> None:
    memory = PagedMemory(num_blocks=19, block_size=2)
    computed(memory, [1, 2, 3, 4, 9])
    assert allocated(memory, [3, 4, 1, 2, 9]).cached_len == 0, "same blocks, other order"
    assert allocated(memory, [1, 2, 9, 9, 9]).cached_len == 2
    assert allocated(memory, [0, 2, 3, 4, 9]).cached_len == 0


def test_what_is_not_scheduled_is_not_shared() -> None:
    memory = PagedMemory(num_blocks=9, block_size=2)
    tokens = [1, 2, 3, 4, 5]
    first = allocated(memory, tokens)
    memory.publish(first, Tokens(0, tokens).known, 3)
    assert allocated(memory, tokens).cached_len == 2


def test_a_twin_admitted_too_early_shares_before_it_runs() -> None:
    memory = PagedMemory(num_blocks=9, block_size=2)
    tokens = [1, 2, 3, 4, 5]
    first, twin = allocated(memory, tokens), allocated(memory, tokens)
    assert memory.used == 12
    memory.publish(first, Tokens(0, tokens).known, 5)
    memory.reuse(twin, Tokens(1, tokens).known, 4)
    assert (twin.cached_len, memory.used) == (4, 8)
    assert twin.blocks[:2] == first.blocks[:2]
    assert twin.blocks[2] != first.blocks[2]
    memory.release(first)
    assert memory.used == 6
    memory.release(twin)
    assert memory.used == 0


def test_least_recently_used_goes_first_and_prefixes_last() -> None:
    memory = PagedMemory(num_blocks=6, block_size=1)
    for tokens in ([1, 2, 3], [7, 8, 9]):
        memory.release(computed(memory, tokens))
    assert memory.num_free == 6
    memory.release(computed(memory, [1, 2, 3]))  # used again: 7, 8, 9 are the oldest now
    allocated(memory, [0, 0])
    assert allocated(memory, [7, 8, 9]).cached_len == 1, "its end was evicted, not its beginning"


def test_spoiled_blocks_are_never_shared() -> None:
    memory = PagedMemory(num_blocks=9, block_size=2)
    memory.release(computed(memory, [1, 2, 3, 4, 5]), spoiled=True)
    assert allocated(memory, [1, 2, 3, 4, 5]).cached_len == 0


def test_without_prefix_cache_nothing_is_shared() -> None:
    memory = PagedMemory(num_blocks=9, block_size=2, prefix_cache=False)
    memory.release(computed(memory, [1, 2, 3, 4, 5]))
    assert allocated(memory, [1, 2, 3, 4, 5]).cached_len == 0


# ---- any order of calls ---------------------------------------------------------------------


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "compute", "reuse", "extend", "release", "reset"]),
        st.integers(0, 99),
        st.lists(st.integers(0, 1), min_size=1, max_size=12),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", MemoryKind)
@settings(max_examples=150)
@given(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3), operations=OPERATIONS)
def test_any_order_of_calls_keeps_the_account(
    kind: MemoryKind,
    num_blocks: int,
    block_size: int,
    operations: list[tuple[str, int, list[int]]],
) -> None:
    """TrackedMemory checks after every call: bounds, fresh blocks, no needless refusal."""
    memory = tracked(kind, num_blocks=num_blocks, block_size=block_size)
    entries: dict[int, Tokens] = {}
    for id, (name, pick, tokens) in enumerate(operations):
        ids = sorted(memory.leases)
        if name == "allocate" and len(tokens) <= memory.capacity:
            entries[id] = Tokens(id, tokens)
            allocate(memory, tokens, id=id)
        elif name == "reset":
            memory.reset()
            assert memory.used == 0
        elif ids:
            entry = entries[ids[pick % len(ids)]]
            lease = memory.leases[entry.id]
            if name == "compute":
                memory.publish(lease, entry.known, min(len(entry.tokens), lease.room))
            elif name == "reuse" and not lease.num_published:
                memory.reuse(lease, entry.known, len(entry.tokens) - 1)
            elif name == "extend" and kind is MemoryKind.PAGED:
                memory.extend(lease, lease.room + 1)
            elif name == "release":
                memory.release(lease, spoiled=pick % 5 == 0)
    for lease in list(memory.leases.values()):
        memory.release(lease)
    assert memory.used == 0
    assert memory.num_free == num_blocks
