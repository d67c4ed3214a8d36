"""bench roofline's arithmetic: which rows are timed, and that a stage's parts are its wall time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from orca_dist.bench.matmuls import Round, Seconds
from orca_dist.bench.roofline import (
    StageTimes,
    check_plain,
    check_roofline,
    chosen,
    interpolated,
    medians,
    rows_of,
    stage_shares,
)
from orca_dist.cli.main import main
from orca_dist.config import EngineConfig
from orca_dist.errors import ConfigError
from orca_dist.metrics.trace import PlanTrace, StageSpan
from orca_dist.spec import parse_spec
from tests.fixtures.large_models import LARGE


def span(received_s: float, start_s: float, end_s: float, sent_s: float) -> StageSpan:
    return StageSpan(
        received_s=received_s,
        input_ready_s=start_s,
        compute_start_s=start_s,
        compute_end_s=end_s,
        sent_s=sent_s,
        bytes_sent=0,
    )


def plan(seq: int, lengths: tuple[int, ...], num_sampled: int, at: StageSpan) -> PlanTrace:
    return PlanTrace(
        seq=seq,
        ids=tuple(range(len(lengths))),
        lengths=lengths,
        sent_s=0.0,
        control_bytes=1,
        spans={1: at},
        num_sampled=num_sampled,
    )


PLANS = [
    plan(1, (7, 1), 1, span(1.0, 1.5, 2.0, 2.25)),  # 0.5 receiving, 0.5 computing, 0.25 sending
    plan(2, (4,), 0, span(2.0, 2.5, 4.5, 4.5)),  # there before the first was done: 0.25 receiving
    plan(3, (1, 1, 1, 1), 4, span(6.0, 6.0, 7.0, 7.5)),  # 1.5 without a plan
]
TIMES = StageTimes(
    layers={4: 0.25, 8: 0.75},
    head={1: 0.125, 4: 0.25},
    read_bytes_s=1000.0,
    layer_bytes=100,
    head_bytes=50,
)


def test_rows_are_those_of_the_batches_and_the_head_is_for_who_samples() -> None:
    rows = rows_of(PLANS)
    assert rows.batch == {8: 1, 4: 2}
    assert rows.sampled == {1: 1, 4: 1}


def test_a_stages_parts_add_up_to_the_wall_time() -> None:
    shares = stage_shares(PLANS, 1, 10.0, TIMES)
    assert (shares.receiving_s, shares.computing_s, shares.sending_s) == (0.75, 3.5, 0.75)
    assert shares.waiting_s == 10.0 - 0.75 - 3.5 - 0.75
    assert shares.matmul_s == 0.75 + 0.125 + 0.25 + 0.25 + 0.25
    assert shares.other_compute_s == 3.5 - 1.625
    assert (shares.weight_bytes, shares.weight_read_s) == (150, (3 * 100 + 2 * 50) / 1000)


def test_few_numbers_of_rows_are_all_timed() -> None:
    assert chosen(Counter([9, 3, 3, 1])) == [1, 3, 9]
    assert chosen(Counter()) == []


def test_of_many_the_common_ones_and_the_ends_are_timed() -> None:
    counts = Counter(range(1, 1001)) + Counter([13, 14, 15] * 5)
    picked = chosen(counts, most=8)
    assert len(picked) <= 8
    assert {1, 13, 14, 15, 1000} <= set(picked)
    assert picked == sorted(picked)


def test_between_two_that_were_timed_lies_a_line() -> None:
    timed = {8: 0.8, 2: 0.2, 4: 0.3}
    assert [interpolated(timed, rows) for rows in (2, 3, 6)] == pytest.approx([0.2, 0.25, 0.55])


def test_medians_are_taken_over_the_rounds() -> None:
    answers = [
        Seconds(layers=[1.0, 5.0], head=[0.1], read_bytes_s=2e9, layer_bytes=7, head_bytes=3),
        Seconds(layers=[3.0, 4.0], head=[0.3], read_bytes_s=1e9, layer_bytes=7, head_bytes=3),
        Seconds(layers=[2.0, 9.0], head=[0.2], read_bytes_s=4e9, layer_bytes=7, head_bytes=3),
    ]
    times = medians(Round(rows=[1, 8], sampled=[2]), answers)
    assert (times.layers, times.head) == ({1: 2.0, 8: 5.0}, {2: 0.2})
    assert times.read_bytes_s == 2e9


def test_stages_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="ray_address = auto: roofline times this"):
        check_roofline(EngineConfig(device="cpu", ray_address="auto"))


def test_matmuls_of_experts_are_not_timed() -> None:
    with pytest.raises(ConfigError, match=r"of 8 experts a trace doesn't say how many rows each"):
        check_plain(parse_spec(LARGE["Mixtral-8x7B"]))
    check_plain(parse_spec(LARGE["Llama-3.1-70B"]))


def test_rounds_are_checked_before_anything_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "roofline", str(tmp_path), "--device", "cpu", "--rounds", "0"]) == 2
    assert "rounds = 0: must be at least 1" in capfd.readouterr().err
