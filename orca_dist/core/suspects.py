"""Requests that may be the reason why stages are lost.

Those of the plan that a lost stage was computing are suspects, until a plan with
them returns. While there are any, each runs alone in the whole pipeline, so that the
next loss has a plain cause. Who has been alone in a fatal plan MAX_FATAL times is
guilty: once may be chance, since a kill from outside meets somebody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_FATAL = 2


class Suspects:
    """Ids, each with how often it was alone in a fatal plan."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._counts

    def accuse(self, plan_ids: Sequence[int], live: Sequence[int]) -> list[int]:
        """A plan of `plan_ids`, of which `live` are alive, was fatal; returns who is guilty."""
        was_alone = len(plan_ids) == 1 and all(id in self._counts for id in live)
        for id in live:
            self._counts[id] = self._counts.get(id, 0) + was_alone
        return [id for id in live if self._counts[id] >= MAX_FATAL]

    def clear(self, ids: Iterable[int]) -> None:
        """They came back, or are gone."""
        for id in ids:
            self._counts.pop(id, None)
