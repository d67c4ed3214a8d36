"""Stages as processes of this machine: for one host without Ray, and for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace

from orca_dist.bootstrap import StageBootstrap
from orca_dist.engine.last_lines import NUM_LAST_LINES, tell_last_lines
from orca_dist.engine.stages import OnDeath

STAGE_MODULE = "orca_dist.stage.process"
LEAVE_TIMEOUT_S = 5.0
HUNG_UP = 1  # the exit code of a stage whose master is gone


class LocalPlacement:
    """One process a stage, watched by a thread that passes its output on and waits for its end."""

    control_host = "127.0.0.1"

    def __init__(self, module: str = STAGE_MODULE) -> None:
        self._module = module
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by stage
        self._watchers: list[threading.Thread] = []
        self._closing = False
        self._killed: set[int] = set()  # pids, by us

    def launch(self, bootstraps: Sequence[StageBootstrap], on_death: OnDeath) -> None:
        for bootstrap in bootstraps:
            process = self._spawn(replace(bootstrap, host=self.control_host))
            self._processes[bootstrap.stage] = process
            watcher = threading.Thread(
                target=self._watch, args=(process, bootstrap.stage, on_death), daemon=True
            )
            watcher.start()
            self._watchers.append(watcher)

    def replace(self, bootstrap: StageBootstrap, on_death: OnDeath) -> None:
        self._end(self._processes.pop(bootstrap.stage), 0.0)
        self.launch([bootstrap], on_death)

    def why_missing(self, stages: Collection[int]) -> str:
        """There is always room for one more process."""
        return ""

    def close(self) -> None:
        """Closed stages leave by themselves; those that are stuck or stopped are killed.

        What the dead printed last has been told when this returns.
        """
        self._closing = True
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for process in self._processes.values():
            self._end(process, max(0.0, deadline - time.monotonic()))
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))

    def _spawn(self, bootstrap: StageBootstrap) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],  # -P: no module of the working folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _import_path()},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(bootstrap)).encode() + b"\n")
        process.stdin.close()
        return process

    def _watch(self, process: subprocess.Popen[bytes], stage: int, on_death: OnDeath) -> None:
        last_lines = _pass_on(process)
        code = process.wait()
        if code and not self._is_our_doing(process.pid, code):
            tell_last_lines(stage, last_lines)
        on_death(stage, f"its process ended with {_ending(code)}")

    def _is_our_doing(self, pid: int, code: int) -> bool:
        """A stage may die just before we close: by its own code alone it is told apart."""
        return pid in self._killed or (self._closing and code == HUNG_UP)

    def _end(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._killed.add(process.pid)
            process.kill()
            process.wait()


def _import_path() -> str:
    """Where this process finds its modules: a stage must run the same code."""
    return os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)


def _pass_on(process: subprocess.Popen[bytes]) -> deque[str]:
    """Everything the process prints goes to stderr; returns its last lines at its end."""
    last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
    assert process.stdout is not None
    with process.stdout as output:
        for data in output:
            line = data.decode(errors="replace")
            last_lines.append(line.rstrip("\n"))
            sys.stderr.write(line)
            sys.stderr.flush()
    return last_lines


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
