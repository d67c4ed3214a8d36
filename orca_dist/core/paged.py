"""Paged memory: blocks on demand, and shared between requests that begin alike.

Full blocks whose tokens are in sent plans form a tree of prefixes: a block's key
is the node before it and its own tokens, so equal keys mean equal prefixes, with
no hash to collide. What nobody holds stays until its room is needed, least
recently used first. Later blocks of a prefix always go before earlier ones, so a
node that is found has all its ancestors.
"""

from __future__ import annotations

from collections import OrderedDict

from orca_dist.core.kv import Known, Lease

ROOT = 0
WATERMARK = 0.01  # of all blocks: kept free at admissions, for those admitted to grow into

Key = tuple[int, tuple[int, ...]]  # node before, tokens


class PagedMemory:
    """Blocks are counted by holders; those without one are free or, if published, cached."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._watermark = int(num_blocks * WATERMARK)
        self._last_node = ROOT  # never used twice, not even after a reset
        self.reset()

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def used(self) -> int:
        return (self.num_blocks - self.num_free) * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._cached)

    def allocate(self, known: Known, num_known: int, max_len: int, max_cached: int) -> Lease | None:
        lease = Lease()
        hits = self._hits(lease, known, max_cached)
        num_new = -(-num_known // self.block_size) - len(hits)
        room = self.num_free - sum(block in self._cached for block in hits)
        keep = self._watermark if self.used else 0
        if num_new > room - keep:
            return None
        for block in hits:
            self._hold(lease, block)
        self._grow(lease, num_new)
        return lease

    def reuse(self, lease: Lease, known: Known, max_cached: int) -> None:
        """Swaps own blocks, still empty, for the same ones of a twin that was scheduled since."""
        num = lease.num_published
        for place, block in enumerate(self._hits(lease, known, max_cached), num):
            own = lease.blocks[place]
            self._hold(lease, block, place)
            self._drop(own)

    def extend(self, lease: Lease, num_slots: int) -> list[int] | None:
        num = -(-num_slots // self.block_size) - len(lease.blocks)
        return self._grow(lease, num) if num <= self.num_free else None

    def publish(self, lease: Lease, known: Known, scheduled_len: int) -> None:
        if not self._prefix_cache:
            return
        size = self.block_size
        for place in range(lease.num_published, scheduled_len // size):
            key = lease.node, known(place * size, (place + 1) * size)
            block = self._index.setdefault(key, lease.blocks[place])
            if block == lease.blocks[place]:  # else a twin was first: its node is ours too
                self._last_node += 1
                self._keys[block], self._nodes[block] = key, self._last_node
            lease.node = self._nodes[block]
            lease.num_published += 1

    def release(self, lease: Lease, *, spoiled: bool = False) -> None:
        assert lease.blocks, "a lease ends once"
        for block in reversed(lease.blocks):
            if spoiled:
                self._unpublish(block)
            self._drop(block)
        lease.blocks = []

    def reset(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * self.num_blocks
        self._index: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # of published blocks
        self._nodes: dict[int, int] = {}  # of published blocks

    def _hits(self, lease: Lease, known: Known, max_cached: int) -> list[int]:
        """Published blocks that go on where the lease's shared ones end."""
        hits: list[int] = []
        node, size = lease.node, self.block_size
        for place in range(lease.num_published, max_cached // size):
            block = self._index.get((node, known(place * size, (place + 1) * size)))
            if block is None:
                break
            hits.append(block)
            node = self._nodes[block]
        return hits

    def _hold(self, lease: Lease, block: int, place: int | None = None) -> None:
        """Share a published block, as the lease's next one or instead of the one at `place`."""
        self._cached.pop(block, None)
        self._holders[block] += 1
        if place is None:
            lease.blocks.append(block)
            lease.room += self.block_size
        else:
            lease.blocks[place] = block
        lease.num_published += 1
        lease.cached_len += self.block_size
        lease.node = self._nodes[block]

    def _grow(self, lease: Lease, num: int) -> list[int]:
        blocks = [self._take() for _ in range(num)]
        lease.blocks += blocks
        lease.room += num * self.block_size
        return blocks

    def _take(self) -> int:
        """A free block; else what was cached and not used for longest."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
        self._holders[block] = 1
        return block

    def _drop(self, block: int) -> None:
        """One holder less; without any, the block is cached if others can find it, else free."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _unpublish(self, block: int) -> None:
        if key := self._keys.pop(block, None):
            del self._index[key]
            del self._nodes[block]
