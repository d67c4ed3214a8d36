"""A stage is lost while requests run: it is replaced, and every answer is what it would have been.

Local processes, on the real control and data planes; Ray's actors are in test_ray.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orca_dist.core import FinishReason, Sampling
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.errors import PipelineLost
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Answer, Front, live, local_config
from tests.fixtures.losing_stage import BREAK_LINK, DIE, RAISE, THRICE

STAGES = 3
NUM_TOKENS = 60
LIMIT_S = 60.0
PROMPTS = [[5, 9, 17], [300], list(range(40, 90)), [7, 7], list(range(200, 240))]


def sampling(index: int) -> Sampling:
    """Greedy and seeded ones take turns."""
    return Sampling(temperature=1.0, seed=index) if index % 2 else Sampling()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The answers without any fault."""
    with live(folder, local_config(1)) as front:
        return [answer.tokens for answer in front.wait(submit_all(front))]


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    """One pipeline for all faults: each leaves it as good as new."""
    with live(folder, local_config(STAGES, heartbeat_s=2.0)) as front:
        yield front


def submit_all(front: Front) -> list[int]:
    return [front.submit(prompt, NUM_TOKENS, sampling(i)) for i, prompt in enumerate(PROMPTS)]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    assert [answer.message for answer in answers] == [""] * len(answers)
    assert {answer.reason for answer in answers} == {FinishReason.LENGTH}
    return [answer.tokens for answer in answers]


def fault(front: Front, stages: list[int], how: signal.Signals) -> None:
    for stage in stages:
        os.kill(front.engine.info().stages[stage].pid, how)


@pytest.mark.parametrize(
    ("stages", "how"),
    [
        pytest.param([0], signal.SIGKILL, marks=pytest.mark.slow),
        ([1], signal.SIGKILL),
        pytest.param([2], signal.SIGKILL, marks=pytest.mark.slow),
        ([1], signal.SIGSTOP),
        ([0, 2], signal.SIGKILL),
    ],
)
def test_streams_pause_and_go_on(
    front: Front, expected: list[list[int]], stages: list[int], how: signal.Signals
) -> None:
    before = front.engine.info()
    ids = submit_all(front)
    front.wait(ids, num_tokens=4)
    fault(front, stages, how)
    assert tokens_of(front.wait(ids)) == expected
    after = front.engine.info()
    assert after.epoch > before.epoch
    for index, (old, new) in enumerate(zip(before.stages, after.stages, strict=True)):
        assert new.state == "ready"
        assert (old.pid != new.pid) == (index in stages), "the others keep their weights"
        assert psutil.pid_exists(old.pid) == (index not in stages)
    load = front.engine.load()
    assert (load.live_requests, load.used_slots) == (0, 0)


def test_an_idle_pipeline_recovers_by_itself(front: Front, expected: list[list[int]]) -> None:
    epoch = front.engine.info().epoch
    fault(front, [1], signal.SIGKILL)
    wait_until(lambda: front.engine.info().epoch > epoch)
    assert tokens_of(front.wait(submit_all(front))) == expected


def test_requests_of_the_pause_are_served_after_it(front: Front, expected: list[list[int]]) -> None:
    epoch = front.engine.info().epoch
    fault(front, [2], signal.SIGKILL)
    wait_until(lambda: front.engine.info().epoch > epoch)
    assert front.engine.info().stages[2].state == "starting", "the recovery is going on"
    assert tokens_of(front.wait(submit_all(front))) == expected


def test_a_cancelled_request_does_not_come_back(front: Front) -> None:
    ids = submit_all(front)
    front.wait(ids, num_tokens=2)
    fault(front, [1], signal.SIGKILL)
    front.cancel(ids[0])
    front.wait(ids[1:])
    assert front.engine.load().live_requests == 0


# ---- faults from within a stage -----------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(RAISE, marks=pytest.mark.slow),
        BREAK_LINK,
        pytest.param(DIE, marks=pytest.mark.slow),
    ],
)
def test_a_fault_within_a_stage(folder: Path, expected: list[list[int]], what: int) -> None:
    """An exception, an abort or a broken link while it computes a token for the first time."""
    placement = LocalPlacement("tests.fixtures.losing_stage")
    with live(folder, local_config(STAGES), placement=placement) as front:
        trigger = front.submit([what, 1, 2], 4)
        ids = submit_all(front)
        assert tokens_of(front.wait(ids)) == expected
        assert front.wait([trigger])[0].reason is FinishReason.LENGTH
        assert front.engine.info().epoch == 2


@pytest.mark.slow
def test_only_a_request_that_ends_stages_by_itself_fails(
    folder: Path, expected: list[list[int]]
) -> None:
    """It ends the stage in company, then twice alone: it is failed, and nobody else."""
    placement = LocalPlacement("tests.fixtures.losing_stage")
    with live(folder, local_config(STAGES, forming="paper"), placement=placement) as front:
        ids = submit_all(front)
        culprit = front.submit([THRICE, 1, 2], 4)
        assert tokens_of(front.wait(ids)) == expected
        (answer,) = front.wait([culprit])
        assert answer.reason is FinishReason.ERROR
        assert "lost 2 times while it computed this request alone" in answer.message
        assert 3 <= front.engine.info().epoch <= 6


@pytest.mark.slow
def test_no_end_of_recoveries_is_the_end(folder: Path) -> None:
    """A stage takes longer to start than a second: lost, with the reason."""
    with live(folder, local_config(2, recovery_timeout_s=1.0)) as front:
        ids = submit_all(front)
        front.wait(ids, num_tokens=2)
        fault(front, [0], signal.SIGKILL)
        with pytest.raises(PipelineLost, match="recovery did not succeed within"):
            front.wait(ids)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
