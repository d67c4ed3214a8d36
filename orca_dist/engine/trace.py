"""What happened when: every plan at the master and at each stage.

Written by the engine master's thread, read by anyone through snapshot(). Feeds
the demo's summary and picture, and the benchmarks. Times are wall-clock seconds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise

from orca_dist.core import Plan
from orca_dist.proto.v1 import control_pb2 as pb

MAX_PLANS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """One plan at one stage."""

    received_s: float
    input_ready_s: float
    compute_start_s: float
    compute_end_s: float
    sent_s: float
    bytes_sent: int


@dataclass(slots=True, kw_only=True)
class PlanTrace:
    """One iteration of one batch."""

    seq: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    sent_s: float
    control_bytes: int
    returned_s: float | None = None
    spans: dict[int, StageSpan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Over the time from the first plan's sending to the last one's return."""

    duration_s: float
    iterations: int
    busy: tuple[float, ...]  # share of the time, per stage
    max_in_flight: int
    mean_in_flight: float


class TraceLog:
    """The last MAX_PLANS plans, oldest first."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._plans: OrderedDict[int, PlanTrace] = OrderedDict()
        self._lock = threading.Lock()

    def sent(self, plan: Plan, control_bytes: int, now: float) -> None:
        with self._lock:
            self._plans[plan.seq] = PlanTrace(
                seq=plan.seq,
                ids=tuple(plan.ids),
                lengths=tuple(plan.lengths),
                sent_s=now,
                control_bytes=control_bytes,
            )
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)

    def returned(self, seq: int, now: float) -> None:
        with self._lock:
            if plan := self._plans.get(seq):
                plan.returned_s = now

    def add_rows(self, stage: int, rows: pb.Trace) -> None:
        columns = zip(
            rows.seq,
            rows.received_s,
            rows.input_ready_s,
            rows.compute_start_s,
            rows.compute_end_s,
            rows.sent_s,
            rows.bytes_sent,
            strict=True,
        )
        with self._lock:
            for seq, received, ready, start, end, sent, num_bytes in columns:
                if plan := self._plans.get(seq):
                    plan.spans[stage] = StageSpan(
                        received_s=received,
                        input_ready_s=ready,
                        compute_start_s=start,
                        compute_end_s=end,
                        sent_s=sent,
                        bytes_sent=num_bytes,
                    )

    def snapshot(self) -> list[PlanTrace]:
        """The plans that have returned, with their rows of all stages, oldest first."""
        with self._lock:
            return [
                plan
                for plan in self._plans.values()
                if plan.returned_s is not None and len(plan.spans) == self.num_stages
            ]


def summarize(plans: list[PlanTrace], num_stages: int) -> TraceSummary:
    """Busy shares and batches in flight of a snapshot."""
    if not plans:
        return TraceSummary(
            duration_s=0.0,
            iterations=0,
            busy=(0.0,) * num_stages,
            max_in_flight=0,
            mean_in_flight=0.0,
        )
    ends = [plan.returned_s or plan.sent_s for plan in plans]
    duration = max(ends) - plans[0].sent_s
    depth = in_flight(plans)
    return TraceSummary(
        duration_s=duration,
        iterations=len(plans),
        busy=tuple(_busy(plans, stage) / duration for stage in range(num_stages)),
        max_in_flight=max(count for _, count in depth),
        mean_in_flight=sum(n * (b - a) for (a, n), (b, _) in pairwise(depth)) / duration,
    )


def in_flight(plans: list[PlanTrace]) -> list[tuple[float, int]]:
    """Steps (time, batches in flight from then on)."""
    changes = [(plan.sent_s, 1) for plan in plans]
    changes += [(plan.returned_s, -1) for plan in plans if plan.returned_s is not None]
    steps, count = [], 0
    for time_s, change in sorted(changes):
        count += change
        steps.append((time_s, count))
    return steps


def _busy(plans: list[PlanTrace], stage: int) -> float:
    spans = (plan.spans[stage] for plan in plans)
    return sum(span.compute_end_s - span.compute_start_s for span in spans)
