"""A pipeline of stages that only take time: the real Scheduler on a virtual clock.

Owns the clock and the order of events; every decision is the scheduler's. A plan
visits the stages in order, a stage serves one plan at a time and in the order of
sending (Orca §4.2), and so does each link between two of them. Nothing can
overtake, so a plan's whole way is known once it is sent, and the only events are
arrivals, returns and the scheduler's own wake-ups: the cost of a plan does not
grow with what is waiting, nor with what is in flight.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orca_dist.core import Output, Plan, PlanResult, Scheduler

TOKEN = [0]  # what every request answers; never changed


class PlanTimes(NamedTuple):
    """How long each stage computes a plan, and how long its activations take to the next one.

    `links_s`: where links differ, each one's time by the stage that it leaves; the last
    stage's is not used.
    """

    stage_s: Sequence[float]
    link_s: float = 0.0
    links_s: Sequence[float] = ()


class Cost(Protocol):
    """What a plan costs."""

    @property
    def num_stages(self) -> int: ...

    def times(self, plan: Plan) -> PlanTimes:
        """One time for each of the stages."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLatency:
    """From select to the stages, and from the end of the last stage to the scheduler."""

    plan_s: float = 0.0
    token_s: float = 0.0


NO_LATENCY = ControlLatency()


@dataclass(slots=True)
class PlanRun:
    """One plan's way through the pipeline; the stages by index.

    Not frozen: there is one for each iteration, and that would cost four times more.
    """

    plan: Plan
    sent_s: float
    starts_s: list[float]
    ends_s: list[float]
    returned_s: float


class Observer(Protocol):
    """Is told what happens, at the pipeline's `now_s`."""

    def sent(self, run: PlanRun) -> None:
        """A plan left; its way is known."""
        ...

    def flushed(self, plan: Plan) -> None:
        """The stages were told to drop requests while nothing else was on its way."""
        ...

    def returned(self, outputs: Sequence[Output]) -> None:
        """What the scheduler had to say after a plan's return, or of missed deadlines."""
        ...


Answer = Callable[[Plan], PlanResult]


def zeros(plan: Plan) -> PlanResult:
    """A model that always says 0."""
    ids = plan.ids
    if not all(plan.samples):
        ids = [id for id, samples in zip(ids, plan.samples, strict=True) if samples]
    return PlanResult(seq=plan.seq, ids=ids, tokens=[TOKEN] * len(ids))


class VirtualPipeline:
    """Feed it with `at`, then `run`. All events of an instant come before the next select()."""

    def __init__(
        self,
        scheduler: Scheduler,
        cost: Cost,
        observer: Observer,
        *,
        latency: ControlLatency = NO_LATENCY,
        answer: Answer = zeros,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.observer = observer
        self.answer = answer
        self.now_s = 0.0
        self._latency = latency
        self._stage_free_s = [0.0] * cost.num_stages
        self._link_free_s = [0.0] * cost.num_stages
        self._in_flight: deque[PlanRun] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wakeup_s = math.inf

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Something from outside: a request comes, or is taken back."""
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def run(self, until_s: float = math.inf) -> None:
        """Let time pass, up to `until_s` or until nothing is left to happen."""
        while (now_s := self._next_s()) <= until_s and now_s < math.inf:
            self.now_s = now_s
            self._return()
            self._happen()
            if missed := self.scheduler.expire(now_s):
                self.observer.returned(missed)
            self._select()
            at_s = self.scheduler.next_wakeup()
            self._wakeup_s = at_s if at_s is not None and at_s > now_s else math.inf

    def _next_s(self) -> float:
        event_s = self._events[0][0] if self._events else math.inf
        return_s = self._in_flight[0].returned_s if self._in_flight else math.inf
        return min(event_s, return_s, self._wakeup_s)

    def _return(self) -> None:
        while self._in_flight and self._in_flight[0].returned_s <= self.now_s:
            plan = self._in_flight.popleft().plan
            self.observer.returned(self.scheduler.on_result(self.answer(plan), self.now_s))

    def _happen(self) -> None:
        while self._events and self._events[0][0] <= self.now_s:
            heapq.heappop(self._events)[-1]()

    def _select(self) -> None:
        while plan := self.scheduler.select(self.now_s):
            run = self._way(plan)
            self._in_flight.append(run)
            self.observer.sent(run)
        if not self._in_flight and (plan := self.scheduler.flush_drops()):
            self.observer.flushed(plan)

    def _way(self, plan: Plan) -> PlanRun:
        """When it starts and ends at each stage: after its input has come and the stage is free."""
        times = self.cost.times(plan)
        links_s = times.links_s or [times.link_s] * len(times.stage_s)
        starts_s: list[float] = []
        ends_s: list[float] = []
        ready_s = self.now_s + self._latency.plan_s
        for stage, service_s in enumerate(times.stage_s):
            start_s = max(ready_s, self._stage_free_s[stage])
            end_s = self._stage_free_s[stage] = start_s + service_s
            starts_s.append(start_s)
            ends_s.append(end_s)
            ready_s = max(end_s, self._link_free_s[stage]) + links_s[stage]
            self._link_free_s[stage] = ready_s
        return PlanRun(plan, self.now_s, starts_s, ends_s, end_s + self._latency.token_s)
