"""One suite over both placements, Ray's and the local one: what the master may rely on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orca_dist.metrics.trace import PlanTrace
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config

STAGES = 2
PROMPTS = [[5, 9, 17], [300], list(range(40, 60))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The answers of a single local stage."""
    with live(folder, local_config(1)) as front:
        return [answer.tokens for answer in front.generate(PROMPTS, 8)]


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def front(folder: Path, request: pytest.FixtureRequest) -> Iterator[Front]:
    """Checks at its end that no stage is left."""
    with live(folder, local_config(STAGES, launcher=request.param, recovery="off")) as front:
        pids = [stage.pid for stage in front.engine.info().stages]
        yield front
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=10)[1]


def test_each_stage_is_a_process_of_its_own(front: Front) -> None:
    stages = front.engine.info().stages
    assert [stage.index for stage in stages] == list(range(STAGES))
    assert len({stage.pid for stage in stages} | {os.getpid()}) == STAGES + 1
    assert all(stage.state == "ready" and stage.node and stage.device for stage in stages)


def test_answers(front: Front, expected: list[list[int]]) -> None:
    assert [answer.tokens for answer in front.generate(PROMPTS, 8)] == expected


def test_every_stage_ran_every_plan(front: Front) -> None:
    front.generate(PROMPTS, 4)
    plans: list[PlanTrace] = front.trace()
    assert plans
    assert all(sorted(plan.spans) == list(range(STAGES)) for plan in plans)


def test_a_killed_stage_is_named(front: Front) -> None:
    """The last one: nothing serves afterwards."""
    front.submit(PROMPTS[0], 200)
    victim = front.engine.info().stages[1]
    os.kill(victim.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while front.lost is None:
        front.pump(max(0.1, deadline - time.monotonic()))
    assert f"stage 1 (pid {victim.pid}" in str(front.lost)
