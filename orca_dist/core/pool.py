"""The request pool (Orca §4): every request from arrival to answer.

Owns three views of the live requests: waiting (no memory yet), admitted (has
memory), and the admitted ones that are runnable, in order. A request's order is
static: arrival - priority x ageing_s. So one of higher priority goes first unless
the other has waited for that much longer, and a lane of one priority is in order
of arrival: nothing ever walks the waiting line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter

from orca_dist.core.deadlines import Deadlines
from orca_dist.core.kv import Lease
from orca_dist.core.policy import Load
from orca_dist.core.request import Entry, Request

Lane = OrderedDict[int, Entry]
in_order = attrgetter("order")


class RequestPool:
    """Membership only; memory and batches are the scheduler's."""

    def __init__(self, *, ageing_s: float) -> None:
        self.entries: dict[int, Entry] = {}
        self.deadlines = Deadlines()
        self.num_waiting = 0
        self._ageing_s = ageing_s
        self._lanes: dict[int, Lane] = {}  # waiting, by priority; none is empty
        self._admitted: dict[int, Entry] = {}
        self._runnable: list[Entry] = []
        self._sorted = True
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_entries(self) -> int:
        """In all of its tables together."""
        waiting = sum(map(len, self._lanes.values())) + len(self._lanes)
        tables = (self.entries, self.deadlines, self._admitted, self._runnable)
        return waiting + sum(len(table) for table in tables)

    def get(self, request_id: int) -> Entry | None:
        return self.entries.get(request_id)

    def add(self, request: Request, now: float, next_seq: int) -> None:
        """A new arrival goes to the end of its lane."""
        assert request.id not in self.entries, f"request id {request.id} is in use"
        order = (now - request.priority * self._ageing_s, self._arrivals)
        self._arrivals += 1
        entry = self.entries[request.id] = Entry(
            request, request.id, order, len(request.prompt), next_seq
        )
        self._lane(entry)[entry.id] = entry
        self.num_waiting += 1
        if request.deadline_s is not None:
            self.deadlines.add(request.id, request.deadline_s)

    def head(self) -> Entry | None:
        """The waiting request that goes first."""
        heads = (next(iter(lane.values())) for lane in self._lanes.values())
        return min(heads, key=in_order, default=None)

    def load(self, *, prefill_tokens: int, next_seq: int) -> Load:
        """The counts that a batching policy decides by."""
        head = self.head()
        since_s = head.order[0] + head.request.priority * self._ageing_s if head else 0.0
        return Load(
            waiting=self.num_waiting,
            admitted=len(self._admitted),
            prefill_tokens=prefill_tokens,
            head_since_s=since_s,
            head_waited=next_seq - head.since_seq if head else 0,
        )

    def admit(self, entry: Entry, lease: Lease) -> None:
        self._unwait(entry)
        entry.lease = lease
        self._admitted[entry.id] = entry
        self.set_runnable([entry])

    def set_runnable(self, entries: Sequence[Entry]) -> None:
        """Call once each time admitted entries come to have tokens to schedule."""
        for entry in entries:
            entry.queued = True
        self._runnable += entries
        self._sorted = False

    def runnable(self) -> list[Entry]:
        """In order. Not a copy: what is taken is to be told to `take`."""
        if not self._sorted:
            self._runnable.sort(key=in_order)  # two sorted runs, mostly: linear
            self._sorted = True
        return self._runnable

    def take(self, entries: Sequence[Entry]) -> None:
        """These, the first of the runnable ones, have been scheduled."""
        for entry in entries:
            entry.queued = False
        del self._runnable[: len(entries)]

    def last_admitted(self) -> Entry:
        """The admitted request that goes last."""
        return max(self._admitted.values(), key=in_order)

    def put_back(self, entry: Entry, next_seq: int) -> None:
        """An admitted request waits again, before all of its lane: it was admitted before them."""
        self._unadmit(entry)
        entry.rewind()
        entry.since_seq = next_seq
        lane = self._lane(entry)
        lane[entry.id] = entry
        lane.move_to_end(entry.id, last=False)
        self.num_waiting += 1

    def remove(self, entry: Entry) -> None:
        """The request has ended, whatever state it was in."""
        del self.entries[entry.id]
        self.deadlines.discard(entry.id)
        if entry.lease is None:
            self._unwait(entry)
        else:
            self._unadmit(entry)
            entry.lease = None

    def restart(self, next_seq: int) -> None:
        """A new epoch: all live requests wait again, in order."""
        self._admitted.clear()
        self._runnable.clear()
        self._lanes.clear()
        for entry in sorted(self.entries.values(), key=in_order):
            entry.rewind()
            entry.computed_len = 0
            entry.queued = False
            entry.since_seq = next_seq
            self._lane(entry)[entry.id] = entry
        self.num_waiting = len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def _lane(self, entry: Entry) -> Lane:
        return self._lanes.setdefault(entry.request.priority, OrderedDict())

    def _unwait(self, entry: Entry) -> None:
        lane = self._lane(entry)
        del lane[entry.id]
        self.num_waiting -= 1
        if not lane:
            del self._lanes[entry.request.priority]

    def _unadmit(self, entry: Entry) -> None:
        del self._admitted[entry.id]
        if entry.queued:
            self._runnable.remove(entry)
            entry.queued = False
