"""How fast requests leave the queue, and so when one that finds it full should come again."""

from __future__ import annotations

from collections import deque

NUM_LAST = 64
MIN_KNOWN = 8  # fewer say nothing
MIN_S, MAX_S = 1.0, 60.0


class QueuePace:
    """Remembers when the last requests left. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self._left_s: deque[float] = deque(maxlen=NUM_LAST)

    def left(self, now_s: float) -> None:
        """A request has begun, or has been taken back."""
        self._left_s.append(now_s)

    def room_in_s(self, num_waiting: int, now_s: float) -> float:
        """In how long half of those waiting will have left, at the pace until now.

        Half: later the queue might run empty, sooner all would come back in vain. A queue that
        has stood still since the last one left counts as slower by that time.
        """
        if len(self._left_s) < MIN_KNOWN:
            return MIN_S
        per_request_s = (now_s - self._left_s[0]) / len(self._left_s)
        return min(MAX_S, max(MIN_S, per_request_s * num_waiting / 2))
