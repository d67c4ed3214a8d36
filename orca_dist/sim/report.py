"""What a simulation shows: throughput, latencies, how busy stages and slots were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from orca_dist.sim.simulation import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds; None where there was nothing to measure."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Of the time from the first arrival to the last end."""

    busy: float
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`normalized_latency_s` is a request's whole time over its tokens (Orca §6.2), `ttft_s`
    the time to its first token, `tpot_s` the time for each of the others.

    `decode_steps` counts iterations that sampled; `slot_utilization` is the share of the
    iterations' places that had a request in them.
    """

    throughput_req_s: float
    normalized_latency_s: Percentiles
    ttft_s: Percentiles
    tpot_s: Percentiles
    stages: tuple[StageShare, ...]
    decode_steps: int
    slot_utilization: float
    preemptions: int

    def document(self) -> dict[str, object]:
        """For --json."""
        return asdict(self)


def make_report(record: Record) -> Report:
    """Of a run that has come to its end."""
    duration_s = record.duration_s
    rows = list(
        zip(record.outs, record.arrived_s, record.first_token_s, record.ended_s, strict=True)
    )
    return Report(
        throughput_req_s=len(rows) / duration_s,
        normalized_latency_s=percentiles((end - start) / out for out, start, _, end in rows),
        ttft_s=percentiles(first - start for _, start, first, _ in rows),
        tpot_s=percentiles((end - first) / (out - 1) for out, _, first, end in rows if out > 1),
        stages=tuple(_share(busy_s / duration_s) for busy_s in record.busy_s),
        decode_steps=record.num_decode_plans,
        slot_utilization=record.num_entries / (record.num_plans * record.max_plan_size),
        preemptions=record.num_preempted,
    )


def percentiles(values: Iterable[float]) -> Percentiles:
    """Between the two nearest values they are interpolated."""
    ordered = sorted(values)
    return Percentiles(
        p50=quantile(ordered, 0.5), p90=quantile(ordered, 0.9), p99=quantile(ordered, 0.99)
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Of values in ascending order; None of none."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _share(busy: float) -> StageShare:
    return StageShare(busy=busy, bubble=max(0.0, 1 - busy))
