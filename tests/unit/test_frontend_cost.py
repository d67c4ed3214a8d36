"""bench frontend's arithmetic: whose CPU time it is, which iterations count, what one costs."""

from __future__ import annotations

import dataclasses
import json

import pytest

from orca_dist.bench.blank_server import CpuTimes, Spent, cpu_times, spent_between
from orca_dist.bench.frontend import FrontendCost, Heard, cost, max_streams
from orca_dist.cli.main import main
from orca_dist.errors import ConfigError
from orca_dist.metrics.trace import PlanTrace

CPU = CpuTimes(front_s=0.5, master_s=0.2, control_s=0.1, grpc_s=0.2)
SPENT = Spent(wall_s=4.0, iterations=100, tokens=1600, cpu=CPU)
HEARD = Heard(tokens=1600, messages=1500, cpu_s=2.0)


def plan(seq: int, returned_s: float | None, num_sampled: int = 3) -> PlanTrace:
    return PlanTrace(
        seq=seq,
        ids=(1, 2, 3),
        lengths=(1, 1, 1),
        sent_s=0.0,
        control_bytes=1,
        returned_s=returned_s,
        num_sampled=num_sampled,
    )


def test_threads_are_told_apart_and_the_rest_is_grpcs_own() -> None:
    names = {
        "MainThread": 1.0,
        "engine-master": 2.0,
        "control-stream 3": 0.25,
        "Thread-7 (_read) 4": 0.5,
        "Thread-1 (_poll_wrapper) 5": 0.125,
    }
    times = cpu_times(names, total_s=4.0)
    assert times == CpuTimes(front_s=1.0, master_s=2.0, control_s=0.75, grpc_s=0.25)
    assert times.total_s == 4.0
    assert times.since(CpuTimes(front_s=0.5, master_s=2.0, control_s=0.5, grpc_s=0.0)) == CpuTimes(
        front_s=0.5, master_s=0.0, control_s=0.25, grpc_s=0.25
    )


def test_plans_count_by_when_they_returned() -> None:
    plans = [plan(1, 9.9), plan(2, 10.0), plan(3, 11.9, 2), plan(4, 12.0), plan(5, None)]
    spent = spent_between(plans, 10.0, 12.0, CPU)
    assert (spent.iterations, spent.tokens, spent.wall_s) == (2, 5, 2.0)
    assert Spent.read(json.dumps(dataclasses.asdict(spent))) == spent


def test_an_iteration_costs_the_window_over_its_iterations() -> None:
    row = cost(8, 128, SPENT, HEARD)
    assert (row.stages, row.streams, row.iterations, row.batch) == (8, 128, 100, 16.0)
    assert (row.front_ms, row.master_ms, row.control_ms, row.grpc_ms) == (5.0, 2.0, 1.0, 2.0)
    assert row.cpu_ms == pytest.approx(10.0)
    assert (row.generator_ms, row.wall_ms, row.messages) == (20.0, 40.0, 15.0)
    assert (row.tokens_s, row.tpot_s) == (400.0, 0.32)


@pytest.mark.parametrize(
    ("spent", "heard"),
    [
        (dataclasses.replace(SPENT, iterations=0), HEARD),
        (SPENT, dataclasses.replace(HEARD, tokens=0)),
    ],
)
def test_a_window_without_tokens_is_refused(spent: Spent, heard: Heard) -> None:
    with pytest.raises(ConfigError, match=r"duration_s = 4.0: no token of 5 streams on 2 stages"):
        cost(2, 5, spent, heard)


def test_max_streams_are_those_whose_tokens_came_in_time() -> None:
    def row(stages: int, streams: int, tpot_s: float) -> FrontendCost:
        return dataclasses.replace(
            cost(stages, streams, SPENT, HEARD), streams=streams, tpot_s=tpot_s
        )

    rows = [row(2, 64, 0.1), row(2, 256, 0.2), row(2, 1024, 0.21), row(8, 64, 0.5)]
    assert max_streams(rows, 0.2) == {2: 256, 8: 0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--streams 0", "streams = 0: must be at least 1 and at most 100000"),
        ("--stages 2 0", "stages = 0: must be at least 1 and at most 1000"),
        ("--duration-s 0", "duration_s = 0.0: must be more than 0, and finite"),
        ("--wait-s -1", "wait_s = -1.0: must be at least 0, and finite"),
        ("--tpot-limit-s nan", "tpot_limit_s = nan: must be more than 0, and finite"),
    ],
)
def test_bad_command_lines(flags: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "frontend", *flags.split()]) == 2
    assert message in capfd.readouterr().err
