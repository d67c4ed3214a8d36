"""Who knows of whose work: vector clocks of streams, wires and host threads (happens-before).

An actor's work is numbered 1, 2, ... Its clock says up to which number it comes after each other
actor's work. Host threads have clocks, but their own work needs no number: it is over when it
returns. Knows no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

Actor = str
Clock = Mapping[Actor, int]


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a buffer: whose work it is, that work's number, and what it was."""

    actor: Actor
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.actor}"


class Clocks:
    """The clock of every actor; those that were never heard of know nothing."""

    def __init__(self) -> None:
        self._clocks: defaultdict[Actor, dict[Actor, int]] = defaultdict(dict)
        self._ended: set[Actor] = set()

    def of(self, actor: Actor) -> Clock:
        return dict(self._clocks[actor])

    def learn(self, actor: Actor, clock: Clock) -> None:
        """From now on the actor's work comes after all that the clock knows."""
        own = self._clocks[actor]
        for other, number in clock.items():
            own[other] = max(own.get(other, 0), number)

    def begin(self, actor: Actor, what: str) -> Access:
        """The actor's next piece of work."""
        own = self._clocks[actor]
        own[actor] = own.get(actor, 0) + 1
        return Access(actor, own[actor], what)

    def end(self, actor: Actor) -> None:
        """The actor is no more: whatever it had begun is over, for everyone."""
        self._ended.add(actor)

    def knows(self, actor: Actor, access: Access) -> bool:
        """Whether the actor's next work comes after this."""
        own = self._clocks[actor].get(access.actor, 0)
        return own >= access.number or access.actor in self._ended


@dataclass(slots=True)
class Buffer:
    """A piece of memory: whose it is, and its uses that somebody may still have to wait for.

    `home`: the stream that it goes back to when it is dropped; None on the host. `holders`: other
    streams that are asked then. `reads` are those since the last write, the newest of each actor.
    """

    home: Actor | None
    is_pinned: bool = False
    holders: set[Actor] = field(default_factory=set)
    write: Access | None = None
    reads: dict[Actor, Access] = field(default_factory=dict)

    @property
    def writes(self) -> list[Access]:
        """What whoever reads has to know of."""
        return [self.write] if self.write else []

    @property
    def uses(self) -> list[Access]:
        """What whoever writes has to know of."""
        return [*self.writes, *self.reads.values()]

    def add_read(self, access: Access) -> None:
        self.reads[access.actor] = access

    def add_write(self, access: Access | None) -> None:
        """None: it is over already."""
        self.write = access
        self.reads = {}
