"""A stage dies or stops: every caller is told, soon, and nothing is left running.

Local processes; the same for Ray actors is in test_ray.py, for a whole server in
test_serve_loss.py. Without recovery, which test_recovery.py is about.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.errors import PipelineLost
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config

LIMIT_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loud")
    loud_llama(folder)
    return folder


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_killed_while_serving(folder: Path, stage: int, caplog: pytest.LogCaptureFixture) -> None:
    with live(folder, local_config(3, recovery="off")) as front:
        ids = [front.submit([5, 9, i], 200) for i in range(4)]
        front.wait(ids, num_tokens=2)
        lost = _kill_and_wait(front, stage, signal.SIGKILL)
        assert f"stage {stage}" in str(lost)
        assert all(front.answers[request_id].reason is None for request_id in ids)
        status = front.engine.info().stages[stage]
        assert status.state == "lost"
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert any(f"stage {stage}" in text and str(status.pid) in text for text in errors)
    _nothing_left(front)


@pytest.mark.slow
def test_stopped(folder: Path) -> None:
    """SIGSTOP: noticed by the missing heartbeat; a late SIGCONT brings nothing back."""
    with live(folder, local_config(3, heartbeat_s=2.0, recovery="off")) as front:
        ids = [front.submit([5, 9, i], 200) for i in range(2)]
        front.wait(ids, num_tokens=2)
        lost = _kill_and_wait(front, 1, signal.SIGSTOP)
        assert "heartbeat" in str(lost)
        counts = [len(front.answers[request_id].tokens) for request_id in ids]
        os.kill(front.engine.info().stages[1].pid, signal.SIGCONT)
        time.sleep(1.0)
        assert [len(front.answers[request_id].tokens) for request_id in ids] == counts
    _nothing_left(front)


def _kill_and_wait(front: Front, stage: int, how: signal.Signals) -> PipelineLost:
    os.kill(front.engine.info().stages[stage].pid, how)
    deadline = time.monotonic() + LIMIT_S
    while front.lost is None:
        front.pump(max(0.1, deadline - time.monotonic()))
    return front.lost


def _nothing_left(front: Front) -> None:
    assert not any(psutil.pid_exists(stage.pid) for stage in front.engine.info().stages)


def test_last_lines_of_a_dead_stage(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stage that ends without a word to its master: what it printed last is in the log."""
    placement = LocalPlacement("tests.fixtures.aborting_stage")
    with live(folder, local_config(2, recovery="off"), placement=placement) as front:
        front.submit([5, 9], 50)
        deadline = time.monotonic() + LIMIT_S
        while front.lost is None:
            front.pump(max(0.1, deadline - time.monotonic()))
    texts = [record.getMessage() for record in caplog.records]
    (tail,) = (text for text in texts if text.startswith("the last lines of stage 1"))
    lines = tail.splitlines()[1:]
    assert len(lines) == 50
    assert lines[-1] == "line 59"
