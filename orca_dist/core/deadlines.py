"""Which live request's deadline comes first."""

from __future__ import annotations

import heapq


class TooLate(Exception):
    """A request can't end before its deadline; says both numbers, in seconds."""

    def __init__(self, needed_s: float, left_s: float) -> None:
        super().__init__(f"needs at least {needed_s:.3g} s, its deadline is in {left_s:.3g} s")
        self.needed_s = needed_s
        self.left_s = left_s


class Deadlines:
    """Ids with a time each. All operations cost O(log n); what left is forgotten in time."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._at)

    def add(self, request_id: int, at_s: float) -> None:
        self._at[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))

    def discard(self, request_id: int) -> None:
        if self._at.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._at) + 16:
            self._heap = [(at_s, id) for id, at_s in self._at.items()]
            heapq.heapify(self._heap)

    def first_s(self) -> float | None:
        """The earliest time, None without any."""
        while self._heap and self._heap[0][1] not in self._at:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[int]:
        """Ids whose time has come, earliest first; they stay until discarded."""
        ids: list[int] = []
        while (first_s := self.first_s()) is not None and first_s <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids
