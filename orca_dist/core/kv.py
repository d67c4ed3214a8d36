"""KV memory of the whole pipeline, counted in slots and handed out in blocks (Orca §4.2).

A slot is the room of one token's keys and values over all layers; a block is
`block_size` slots. The master alone decides block tables; stages obey. Reuse is
ordered, not awaited: every stage runs plans in order on its own KV, so a block
that comes back now may be given to any later plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

Known = Callable[[int, int], tuple[int, ...]]  # a request's known tokens [start, end)


class MemoryKind(StrEnum):
    """When a request gets its slots."""

    PAGED = "paged"
    RESERVE = "reserve"


class NeverFits(Exception):
    """A request needs more slots than the pipeline has; says both numbers."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"needs {needed} KV slots, the pipeline has {capacity}")
        self.needed = needed
        self.capacity = capacity


@dataclass(slots=True, eq=False)
class Lease:
    """What an admitted request holds: `blocks` in the order of its positions.

    `room` is how many slots they are, and the first `cached_len` of them have been
    computed for another request already.
    """

    blocks: list[int] = field(default_factory=list)
    room: int = 0
    cached_len: int = 0
    num_published: int = 0  # first blocks that others may share
    node: int = 0  # of the last of these in the prefix tree


class Memory(Protocol):
    """What the scheduler asks of a memory policy."""

    @property
    def capacity(self) -> int:
        """Slots in all."""
        ...

    @property
    def used(self) -> int:
        """Slots that leases hold."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now."""
        ...

    def allocate(self, known: Known, num_known: int, max_len: int, max_cached: int) -> Lease | None:
        """Room for a request's known tokens at least, or None while there is none.

        `max_len`: slots that it can come to need. At most `max_cached` of its first
        tokens may be another request's. What fits beside no other request is given
        once there is no other.
        """
        ...

    def reuse(self, lease: Lease, known: Known, max_cached: int) -> None:
        """Just before its first iteration: share what others have computed since allocate()."""
        ...

    def extend(self, lease: Lease, num_slots: int) -> list[int] | None:
        """The blocks to add for `num_slots` in all, or None while there are none."""
        ...

    def publish(self, lease: Lease, known: Known, scheduled_len: int) -> None:
        """Its first `scheduled_len` tokens are in plans that were sent: later ones may share."""
        ...

    def release(self, lease: Lease, *, spoiled: bool = False) -> None:
        """Take back all blocks. Once: a second call is an error.

        `spoiled`: what they hold is not to be shared any more.
        """
        ...

    def reset(self) -> None:
        """Start a new epoch: everything is free and leases are void."""
        ...


class ReserveMemory:
    """The paper's rule: prompt + max_tokens slots from admission to the end.

    The worst case is taken at once, so there is no deadlock and no preemption,
    and nothing is shared.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = []
        self.reset()

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def used(self) -> int:
        return (self.num_blocks - len(self._free)) * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, known: Known, num_known: int, max_len: int, max_cached: int) -> Lease | None:
        num = -(-max_len // self.block_size)
        if num > len(self._free):
            return None
        return Lease(blocks=pop_last(self._free, num), room=num * self.block_size)

    def reuse(self, lease: Lease, known: Known, max_cached: int) -> None:
        pass

    def extend(self, lease: Lease, num_slots: int) -> list[int] | None:
        raise AssertionError(f"{num_slots} slots asked for, {lease.room} were reserved")

    def publish(self, lease: Lease, known: Known, scheduled_len: int) -> None:
        pass

    def release(self, lease: Lease, *, spoiled: bool = False) -> None:
        assert lease.blocks, "a lease ends once"
        self._free.extend(reversed(lease.blocks))
        lease.blocks = []

    def reset(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))


def pop_last(items: list[int], num: int) -> list[int]:
    """Take the last `num` away."""
    cut = len(items) - num
    taken = items[cut:]
    del items[cut:]
    return taken
