"""What happened when, as plain values: every plan at the master and at each stage.

Written by the engine's TraceLog; summaries and pictures are made from it. Knows
no engine. Times are wall-clock seconds, comparable as far as clocks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


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
    """One iteration of one batch: each of `ids` computes `lengths` tokens from `starts` on.

    `num_sampled` of them reach their last known token.
    """

    seq: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    sent_s: float
    control_bytes: int
    returned_s: float | None = None
    spans: dict[int, StageSpan] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    num_sampled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """`busy`: the share of the time in which the stage computed."""

    busy: float
    iterations: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Over the time from the first plan's sending to the last one's return."""

    duration_s: float
    iterations: int
    stages: tuple[StageSummary, ...]
    max_in_flight: int
    mean_in_flight: float


def summarize(plans: Sequence[PlanTrace], num_stages: int) -> TraceSummary:
    """What the stages did in `plans`, which have returned; all zeros where there are none."""
    depth = in_flight(plans)
    duration_s = depth[-1][0] - depth[0][0] if depth else 0.0
    area = sum(num * (until - since) for (since, num), (until, _) in pairwise(depth))
    return TraceSummary(
        duration_s=duration_s,
        iterations=len(plans),
        stages=tuple(_stage(plans, stage, duration_s) for stage in range(num_stages)),
        max_in_flight=max((num for _, num in depth), default=0),
        mean_in_flight=area / duration_s if duration_s else 0.0,
    )


def in_flight(plans: Sequence[PlanTrace]) -> list[tuple[float, int]]:
    """Steps (time, batches in flight from then on)."""
    changes = [(plan.sent_s, 1) for plan in plans]
    changes += [(plan.returned_s, -1) for plan in plans if plan.returned_s is not None]
    steps, count = [], 0
    for time_s, change in sorted(changes):
        count += change
        steps.append((time_s, count))
    return steps


def _stage(plans: Sequence[PlanTrace], stage: int, duration_s: float) -> StageSummary:
    spans = [plan.spans[stage] for plan in plans if stage in plan.spans]
    busy_s = sum(span.compute_end_s - span.compute_start_s for span in spans)
    return StageSummary(
        busy=busy_s / duration_s if duration_s else 0.0,
        iterations=len(spans),
        bytes_sent=sum(span.bytes_sent for span in spans),
    )
