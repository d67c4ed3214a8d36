"""Stages as processes of this machine: for one host without Ray, and for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from orca_dist.bootstrap import StageBootstrap
from orca_dist.engine.pipeline import OnDeath

STAGE_MODULE = "orca_dist.stage.process"
LEAVE_TIMEOUT_S = 5.0


class LocalPlacement:
    """One process a stage, watched by a thread that waits for its end."""

    control_host = "127.0.0.1"

    def __init__(self, module: str = STAGE_MODULE) -> None:
        self._module = module
        self._processes: list[subprocess.Popen[bytes]] = []

    def launch(self, bootstraps: Sequence[StageBootstrap], on_death: OnDeath) -> None:
        for bootstrap in bootstraps:
            process = self._spawn(replace(bootstrap, host=self.control_host))
            self._processes.append(process)
            threading.Thread(
                target=_watch, args=(process, bootstrap.stage, on_death), daemon=True
            ).start()

    def close(self) -> None:
        """Closed stages leave by themselves; those that are stuck or stopped are killed."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for process in self._processes:
            _end(process, max(0.0, deadline - time.monotonic()))

    def _spawn(self, bootstrap: StageBootstrap) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if _has_fileno() else None,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(bootstrap)).encode() + b"\n")
        process.stdin.close()
        return process


def _has_fileno() -> bool:
    """Whether stderr is a real file: test runners replace it."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _watch(process: subprocess.Popen[bytes], stage: int, on_death: OnDeath) -> None:
    code = process.wait()
    on_death(stage, f"its process ended with {_ending(code)}")


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
