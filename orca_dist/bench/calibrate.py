"""From what stages did to what an iteration costs: the table that the simulator reads.

A stage's time is fitted, with no negative term, as

    constant + f(T) + s S + c C + a A

for T tokens, of which S are sampled and which attend to A slots in all, over C slots of
context; f is piecewise linear and never falls. Every batch counts by its relative error, and
less where it is far off: a machine that has other work has slow seconds, and they are not the
stage's. The format of the table is sim.table's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from orca_dist.metrics.trace import PlanTrace, StageSpan
from orca_dist.sim.batch import BatchShape, shape_of_spans

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
TOLERANCE = 1e-9
ROUNDS, REACH = 10, 1.345 * 1.4826  # of typical_fit; REACH in median absolute errors
KNOT_BATCHES = 8  # fewer of them don't make a knot of their own
MASTER_LIMIT_S = 0.02  # a plan sent later than this after a return was not waiting for it


def shape_of(plan: PlanTrace) -> BatchShape:
    """What the plan's cost depends on."""
    return shape_of_spans(plan.starts, plan.lengths, plan.num_sampled)


def cost_document(
    plans: Sequence[PlanTrace], *, layers: Sequence[int], model: str, device: str, kv_tokens: int
) -> dict[str, object]:
    """The table as JSON, of plans in the order of sending; `layers` of each stage."""
    shapes = [shape_of(plan) for plan in plans]
    num_stages = len(layers)
    stages = []
    for stage in range(num_stages):
        gap_s = _median(_gaps(plans, stage))
        times = [compute_s(plan.spans[stage]) + gap_s for plan in plans]
        curves = fit_stage(shapes, times, samples=stage == num_stages - 1)
        stages.append({"layers": layers[stage], **curves})
    link = [pair for stage in range(1, num_stages) for pair in _link_times(plans, stage)]
    return {
        "schema": 1,
        "model": model,
        "device": device,
        "stages": stages,
        "link": fit_line(link),
        "plan_latency_s": _median(_plan_latencies(plans)) + _median(_master_times(plans)),
        "token_latency_s": _median(_token_latencies(plans, num_stages - 1)),
        "kv_tokens": kv_tokens,
    }


def fit_stage(
    shapes: Sequence[BatchShape], times_s: Sequence[float], *, samples: bool
) -> dict[str, list[list[float]]]:
    """The stage's curves; `sampled` only where it `samples`."""
    tokens = np.array([shape.num_tokens for shape in shapes], float)
    knots = _knots(tokens)
    columns = [np.ones_like(tokens)]
    columns += [np.clip(tokens, low, high) - low for low, high in pairwise(knots)]
    columns.append(np.array([shape.num_sampled * samples for shape in shapes], float))
    columns.append(np.array([shape.context for shape in shapes], float))
    columns.append(np.array([shape.attended for shape in shapes], float))
    weights = typical_fit(np.stack(columns, axis=1), np.array(times_s, float))
    *steps, sampled, context, attended = weights.tolist()
    heights = np.cumsum([steps[0], *np.multiply(steps[1:], np.diff(knots))]).tolist()
    curves = {
        "tokens": [[x, max(y, 1e-9)] for x, y in zip(knots, heights, strict=True)],
        "context": [[0, 0.0], [1, context]],
        "attended": [[0, 0.0], [1, attended]],
    }
    return curves | ({"sampled": [[0, 0.0], [1, sampled]]} if samples else {})


def fit_line(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """constant + slope x, neither negative."""
    if not points:
        return [[0, 0.0]]
    xs, ys = np.array(points, float).T
    constant, slope = least_squares(np.stack([np.ones_like(xs), xs], axis=1), ys).tolist()
    return [[0, constant], [1, constant + slope]]


def typical_fit(columns: Floats, values: Floats) -> Floats:
    """The weights >= 0 whose sum of columns is what most of `values` are, relatively.

    Huber's estimator by reweighted least squares (Holland and Welsch, Robust regression
    using iteratively reweighted least-squares, 1977): within 1.345 standard deviations an
    error counts by its square, beyond by its size.
    """
    weights = least_squares(columns, values)
    for _ in range(ROUNDS):
        fitted = np.maximum(columns @ weights, 1e-300)
        errors = np.abs(values / fitted - 1)
        reach = max(REACH * float(np.median(errors)), TOLERANCE)
        trust = np.sqrt(reach / np.maximum(errors, reach)) / fitted
        weights = least_squares(columns * trust[:, None], values * trust)
    return weights


def least_squares(columns: Floats, values: Floats) -> Floats:
    """The weights >= 0 whose sum of columns comes closest to `values`.

    By active sets (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23): a
    weight becomes free while that helps, and is fixed at 0 again when it would turn negative.
    """
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    scaled = columns / scale
    weights, free = np.zeros(scaled.shape[1]), np.zeros(scaled.shape[1], bool)
    for _ in range(3 * len(weights)):
        slope = np.where(free, -np.inf, scaled.T @ (values - scaled @ weights))
        if slope.max() <= TOLERANCE * np.abs(values).sum():
            break
        free[slope.argmax()] = True
        weights = _least_squares_of(scaled, values, weights, free)
    result: Floats = weights / scale
    return result


def _least_squares_of(columns: Floats, values: Floats, weights: Floats, free: Mask) -> Floats:
    """Towards the best free weights, as far as none of them turns negative; `free` may shrink."""
    while True:
        best = np.zeros_like(weights)
        best[free] = np.linalg.lstsq(columns[:, free], values, rcond=None)[0]
        negative = free & (best <= 0)
        if not negative.any():
            return best
        share = (weights[negative] / (weights[negative] - best[negative] + 1e-300)).min()
        weights = weights + share * (best - weights)
        free &= weights > 1e-12
        weights = np.where(free, weights, 0.0)


def _knots(tokens: Floats) -> list[float]:
    """The smallest batch, then the largest of every octave, or of more where they hold few."""
    ordered = np.sort(tokens)
    knots, since = [ordered[0], ordered[-1]], 0
    for at, (x, following) in enumerate(pairwise(ordered), start=1):
        ends = np.floor(np.log2(x)) < np.floor(np.log2(following))
        if ends and at - since >= KNOT_BATCHES:
            knots.append(x)
            since = at
    return sorted({float(x) for x in knots})


def compute_s(span: StageSpan) -> float:
    """What the stage computed for."""
    return span.compute_end_s - span.compute_start_s


def _gaps(plans: Sequence[PlanTrace], stage: int) -> Iterator[float]:
    """Between two plans at a stage where the second one's input was waiting already."""
    for plan, following in pairwise(plans):
        end_s = plan.spans[stage].compute_end_s
        span = following.spans[stage]
        there_s = following.spans[stage - 1].sent_s if stage else span.received_s
        if max(there_s, span.received_s) <= end_s:
            yield span.compute_start_s - end_s


def _link_times(plans: Sequence[PlanTrace], stage: int) -> Iterator[tuple[float, float]]:
    """(rows, seconds) from one stage's end to the next one's start, where that was waiting."""
    for before, plan in pairwise(plans):
        sent_s = plan.spans[stage - 1].compute_end_s
        if before.spans[stage].sent_s <= sent_s:
            rows = sum(plan.lengths)
            yield float(rows), max(0.0, plan.spans[stage].compute_start_s - sent_s)


def _plan_latencies(plans: Sequence[PlanTrace]) -> Iterator[float]:
    """From sending to the start on an idle first stage."""
    for before, plan in pairwise(plans):
        if before.spans[0].sent_s <= plan.sent_s:
            yield max(0.0, plan.spans[0].compute_start_s - plan.sent_s)


def _master_times(plans: Sequence[PlanTrace]) -> Iterator[float]:
    """From a plan's return to the sending of the next one, which waited for it."""
    returns = sorted(plan.returned_s for plan in plans if plan.returned_s is not None)
    at = 0
    for plan in plans:
        while at + 1 < len(returns) and returns[at + 1] <= plan.sent_s:
            at += 1
        if 0 <= plan.sent_s - returns[at] < MASTER_LIMIT_S:
            yield plan.sent_s - returns[at]


def _token_latencies(plans: Sequence[PlanTrace], last: int) -> Iterator[float]:
    for plan in plans:
        if plan.returned_s is not None:
            yield max(0.0, plan.returned_s - plan.spans[last].compute_end_s)


def _median(values: Iterator[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
