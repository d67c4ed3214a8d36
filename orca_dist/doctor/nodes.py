"""The seam between a doctor and the machines: this one alone, or all of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orca_dist.doctor.examiner import Examiner
from orca_dist.doctor.facts import Link, NodeFacts, Question, RayPort, Room, Unheard
from orca_dist.doctor.probe import Endpoint

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One node is to dial another; `source` counts in the order of `names`."""

    source: int
    endpoint: Endpoint


class Nodes(Protocol):
    """Nodes in a fixed order, the one that this process runs on first."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def head(self) -> RayPort | None:
        """The cluster's Ray head, asked without a token; None where there is no cluster."""
        ...

    @property
    def rooms(self) -> Sequence[Room]:
        """Of each node; empty where stages get what they ask for, as on a private Ray."""
        ...

    def gather(self, questions: Sequence[Question]) -> list[NodeFacts | Unheard]:
        """One question for each node, all at once."""
        ...

    def listen(self, token: bytes) -> list[Endpoint | Unheard]:
        """All listen, until close()."""
        ...

    def dial(self, calls: Sequence[Call], token: bytes) -> list[Link]:
        """All calls at once."""
        ...


class ThisNode:
    """The machine that this process runs on, whose stages would talk over loopback."""

    names = (LOOPBACK,)
    head = None
    rooms: Sequence[Room] = ()

    def __init__(self) -> None:
        self._examiner = Examiner(LOOPBACK, LOOPBACK)

    def gather(self, questions: Sequence[Question]) -> list[NodeFacts | Unheard]:
        return [self._examiner.gather(question) for question in questions]

    def listen(self, token: bytes) -> list[Endpoint | Unheard]:
        return [self._examiner.listen(token)]

    def dial(self, calls: Sequence[Call], token: bytes) -> list[Link]:
        return [self._examiner.dial(call.endpoint, token) for call in calls]

    def close(self) -> None:
        """Stops listening."""
        self._examiner.close()
