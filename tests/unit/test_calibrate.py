"""From traces to a cost table: what was put in comes out, and the simulator reads it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from orca_dist.bench.calibrate import (
    cost_document,
    fit_line,
    fit_stage,
    least_squares,
    shape_of,
)
from orca_dist.core import Plan
from orca_dist.metrics.trace import PlanTrace, StageSpan
from orca_dist.sim.batch import BatchShape, batch_shape
from orca_dist.sim.table import read_cost_table


def shapes(num: int, seed: int = 3) -> list[BatchShape]:
    rng = random.Random(seed)
    return [
        BatchShape(
            num_tokens=(num_tokens := rng.choice([1, 2, 5, 8, 30, 64, 200, 512])),
            num_sampled=min(num_tokens, rng.randint(1, 8)),
            context=rng.randint(num_tokens, 20_000),
            attended=float(rng.randint(num_tokens, 40_000)),
        )
        for _ in range(num)
    ]


def test_weights_are_never_negative_and_exact_where_they_can_be() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 5.0]])
    assert least_squares(columns, columns @ [0.5, 2.0]) == pytest.approx([0.5, 2.0])
    assert least_squares(columns, columns @ [9.0, -1.0]).min() == 0.0


def test_a_stage_that_costs_by_the_formula_is_found() -> None:
    seen = shapes(300)
    times = [
        0.01 + 0.0002 * s.num_tokens + 3e-6 * s.context + 1e-6 * s.attended + 0.003 * s.num_sampled
        for s in seen
    ]
    curves = fit_stage(seen, times, samples=True)
    assert curves["context"][1][1] == pytest.approx(3e-6, rel=0.05)
    assert curves["attended"][1][1] == pytest.approx(1e-6, rel=0.05)
    assert curves["sampled"][1][1] == pytest.approx(0.003, rel=0.1)
    for x, y in curves["tokens"]:
        assert y == pytest.approx(0.01 + 0.0002 * x, rel=0.1)
    assert "sampled" not in fit_stage(seen, times, samples=False)


def test_the_sum_of_noisy_times_is_kept() -> None:
    """Throughput depends on it."""
    rng = random.Random(5)
    seen = shapes(2000)
    times = [(0.01 + 0.0002 * s.num_tokens) * rng.uniform(0.5, 2.0) for s in seen]
    curves = fit_stage(seen, times, samples=False)
    xs, ys = zip(*curves["tokens"], strict=True)
    slopes = [curves[name][1][1] for name in ("context", "attended")]
    fitted = sum(
        np.interp(s.num_tokens, xs, ys) + slopes[0] * s.context + slopes[1] * s.attended
        for s in seen
    )
    assert fitted == pytest.approx(sum(times), rel=0.02)


def test_slow_seconds_of_the_machine_are_not_the_stages() -> None:
    """One batch in six takes three times as long; least squares would say a third more."""
    rng = random.Random(7)
    seen = shapes(600)
    true_s = [0.01 + 0.0002 * s.num_tokens + 1e-6 * s.attended for s in seen]
    times = [t * (3.0 if rng.random() < 1 / 6 else rng.uniform(0.97, 1.03)) for t in true_s]
    curves = fit_stage(seen, times, samples=False)
    for x, y in curves["tokens"]:
        assert y == pytest.approx(0.01 + 0.0002 * x, rel=0.06)


def test_a_line_never_falls() -> None:
    assert fit_line([(1.0, 3.0), (3.0, 7.0)]) == [[0, pytest.approx(1.0)], [1, pytest.approx(3.0)]]
    assert fit_line([]) == [[0, 0.0]]


def test_shapes_are_the_simulators() -> None:
    plan = Plan(seq=1)
    plan.add(1, 5, 1, samples=True)
    plan.add(2, 32, 7, samples=False)
    trace = trace_of(plan, sent_s=0.0, stages=[])
    batch = batch_shape(plan)
    assert shape_of(trace) == batch


def trace_of(plan: Plan, *, sent_s: float, stages: list[float]) -> PlanTrace:
    """Stages in a row, 1 ms between them, on the plan that is alone in the pipeline."""
    spans: dict[int, StageSpan] = {}
    start_s = sent_s + 0.002
    for stage, seconds in enumerate(stages):
        end_s = start_s + seconds
        spans[stage] = StageSpan(
            received_s=sent_s + 0.001,
            input_ready_s=start_s,
            compute_start_s=start_s,
            compute_end_s=end_s,
            sent_s=end_s,
            bytes_sent=0,
        )
        start_s = end_s + 0.001
    return PlanTrace(
        seq=plan.seq,
        ids=tuple(plan.ids),
        lengths=tuple(plan.lengths),
        starts=tuple(plan.starts),
        num_sampled=sum(plan.samples),
        sent_s=sent_s,
        control_bytes=0,
        returned_s=start_s - 0.001 + 0.0005,
        spans=spans,
    )


def test_a_pipeline_of_known_times_gives_its_table(tmp_path: Path) -> None:
    plans, now_s = [], 100.0
    for seq in range(200):
        plan = Plan(seq=seq)
        plan.add(1, 0, 1 + seq % 64, samples=True)
        rows = plan.num_tokens
        plans.append(trace_of(plan, sent_s=now_s, stages=[0.01 + 0.001 * rows, 0.02]))
        returned_s = plans[-1].returned_s
        assert returned_s is not None
        now_s = returned_s + 0.0003
    document = cost_document(plans, layers=[3, 2], model="m", device="cpu", kv_tokens=999)
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(document))
    table = read_cost_table(path)
    for rows in (1, 17, 64):
        plan = Plan(seq=0)
        plan.add(1, 0, rows, samples=True)
        times = table.times(plan)
        assert times.stage_s == pytest.approx([0.01 + 0.001 * rows, 0.02], rel=0.02)
        assert times.link_s == pytest.approx(0.001, rel=0.1)
    assert table.latency.plan_s == pytest.approx(0.0023, rel=0.05)
    assert table.latency.token_s == pytest.approx(0.0005, rel=0.05)
    assert table.kv_tokens == 999
