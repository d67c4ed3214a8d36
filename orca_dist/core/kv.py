"""KV memory of the whole pipeline, counted in slots and handed out in blocks (Orca §4.2).

A slot is the room of one token's keys and values over all layers; a block is
`block_size` slots. The master alone decides block tables; stages obey. `reserve`
is the paper's rule: the worst case is taken when a request is first scheduled
and given back when it ends, so there is no deadlock and no preemption.
"""

from __future__ import annotations

from typing import Protocol


class NeverFits(Exception):
    """A request needs more slots than the pipeline has; says both numbers."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"needs {needed} KV slots, the pipeline has {capacity}")
        self.needed = needed
        self.capacity = capacity


class Memory(Protocol):
    """What the scheduler asks of a memory policy."""

    @property
    def capacity(self) -> int:
        """Slots in all."""
        ...

    @property
    def used(self) -> int:
        """Slots handed out."""
        ...

    def allocate(self, request_id: int, num_slots: int) -> list[int] | None:
        """Blocks for a request's worst case, or None while there is no room."""
        ...

    def release(self, request_id: int) -> None:
        """Take back all blocks of a request. Once: a second call is an error."""
        ...

    def reset(self) -> None:
        """Start a new epoch: everything is free."""
        ...


class ReserveMemory:
    """prompt + max_tokens slots, rounded up to blocks, from first scheduling to the end."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._held: dict[int, list[int]] = {}
        self._free: list[int] = []
        self.reset()

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def used(self) -> int:
        return self.capacity - len(self._free) * self.block_size

    def allocate(self, request_id: int, num_slots: int) -> list[int] | None:
        assert request_id not in self._held, f"request {request_id} reserves twice"
        num = -(-num_slots // self.block_size)
        if num > self.num_blocks:
            raise NeverFits(num_slots, self.capacity)
        if num > len(self._free):
            return None
        cut = len(self._free) - num
        blocks = self._free[cut:]
        del self._free[cut:]
        self._held[request_id] = blocks
        return blocks

    def release(self, request_id: int) -> None:
        self._free.extend(reversed(self._held.pop(request_id)))

    def reset(self) -> None:
        self._held.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
