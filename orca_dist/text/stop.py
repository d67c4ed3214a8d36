"""Stop strings in a text that arrives in parts: what may be sent on, and where it ends.

Pure. Holds back only what may still turn out to be a stop string's beginning. Time is
linear in the text, whatever it holds (Knuth, Morris and Pratt's matching, one a stop).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One per answer. The match that is complete first wins; of those, the longest."""

    def __init__(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        """`stops`: none of them empty. `include_stop`: the stop itself is part of the text."""
        self.matched = False
        self._searches = [_Search(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """What is final now that `text` has come; after a match nothing ever is."""
        if self.matched:
            return ""
        if not self._searches:
            return text
        known = self._held + text
        for end in range(len(self._held) + 1, len(known) + 1):
            if stop_len := self._step(known[end - 1]):
                return self._cut(known, end, stop_len)
        held_len = max((search.matched_len for search in self._searches), default=0)
        self._held = known[len(known) - held_len :]
        return known[: len(known) - held_len]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """The length of the longest stop that `character` completes; 0 if none."""
        lengths = [search.stop_len for search in self._searches if search.step(character)]
        return max(lengths, default=0)

    def _cut(self, known: str, end: int, stop_len: int) -> str:
        self.matched = True
        self._held = ""
        return known[: end if self._include_stop else end - stop_len]


class _Search:
    """How much of one stop the text ends with; a text ends when a stop is complete."""

    def __init__(self, stop: str) -> None:
        self.stop_len = len(stop)
        self.matched_len = 0
        self._stop = stop
        self._shorter = _borders(stop)

    def step(self, character: str) -> bool:
        """Whether `character` completes the stop."""
        self.matched_len = _longer(self._stop, self._shorter, self.matched_len, character)
        return self.matched_len == self.stop_len


def _borders(stop: str) -> list[int]:
    """For each length of a beginning, how long the next shorter one is that it ends with."""
    borders = [0, 0]
    for character in stop[1:]:
        borders.append(_longer(stop, borders, borders[-1], character))
    return borders


def _longer(stop: str, borders: Sequence[int], matched_len: int, character: str) -> int:
    """The matched length after one more character."""
    while matched_len and stop[matched_len] != character:
        matched_len = borders[matched_len]
    return matched_len + 1 if stop[matched_len] == character else 0
