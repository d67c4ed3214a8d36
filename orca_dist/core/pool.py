"""The request pool (Orca §4): every request from arrival to answer.

Owns three views of the live requests: waiting (no memory yet, in arrival
order), admitted (has memory), and the admitted ones that are runnable, as a
heap in arrival order. All operations cost O(1) or O(log admitted): nothing
walks the waiting line.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from orca_dist.core.request import Entry, Request


class RequestPool:
    """Membership only; memory and batches are the scheduler's."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._waiting: OrderedDict[int, Entry] = OrderedDict()
        self._runnable: list[tuple[int, Entry]] = []
        self._arrivals = 0
        self.num_admitted = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def get(self, request_id: int) -> Entry | None:
        return self._entries.get(request_id)

    def add(self, request: Request) -> Entry:
        """A new arrival goes to the end of the waiting line."""
        assert request.id not in self._entries, f"request id {request.id} is in use"
        entry = Entry(request, self._arrivals, list(request.prompt))
        self._arrivals += 1
        self._entries[request.id] = self._waiting[request.id] = entry
        return entry

    def head(self) -> Entry | None:
        """The waiting request that arrived first."""
        return next(iter(self._waiting.values()), None)

    def admit(self, entry: Entry, blocks: list[int]) -> None:
        del self._waiting[entry.id]
        entry.blocks, entry.admitted = blocks, True
        self.num_admitted += 1
        self.set_runnable(entry)

    def set_runnable(self, entry: Entry) -> None:
        """Call once each time an admitted entry comes to have unscheduled tokens."""
        heapq.heappush(self._runnable, (entry.order, entry))

    def first_runnable(self) -> Entry | None:
        """The runnable request that arrived first; it stays where it is."""
        while self._runnable and not self._runnable[0][1].alive:
            heapq.heappop(self._runnable)
        return self._runnable[0][1] if self._runnable else None

    def take_runnable(self) -> None:
        """Remove what first_runnable() returned: it is being scheduled."""
        heapq.heappop(self._runnable)

    def remove(self, entry: Entry) -> None:
        """The request has ended, whatever state it was in."""
        entry.alive = False
        del self._entries[entry.id]
        if entry.admitted:
            self.num_admitted -= 1
        else:
            del self._waiting[entry.id]

    def restart(self) -> None:
        """A new epoch: all live requests wait again, in arrival order."""
        for entry in self._entries.values():
            entry.rewind()
        in_order = sorted(self._entries.values(), key=lambda entry: entry.order)
        self._waiting = OrderedDict((entry.id, entry) for entry in in_order)
        self._runnable = []
        self.num_admitted = 0
