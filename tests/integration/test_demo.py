"""`make demo` as a process of its own: what it prints, how it ends, what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.fixtures.models import smollm2_folder  # noqa: F401  a fixture
from tests.fixtures.serving import name_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("smollm2_folder"),
]

ROOT = Path(__file__).resolve().parents[2]
LEAVE_S = 10.0


@dataclass(slots=True)
class Demo:
    """The running demo, its output so far, and every process that it has had below it."""

    process: subprocess.Popen[str]
    temp_dir: Path
    lines: list[str] = field(default_factory=list)
    family: set[psutil.Process] = field(default_factory=set)

    def read(self, until: str = "") -> list[str]:
        """Reads on to a line that starts with `until`, or to the end; all lines so far."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._count_family()
            if until and line.startswith(until):
                break
        return self.lines

    def end(self) -> int:
        """The exit code."""
        self.read()
        return self.process.wait()

    def stage(self) -> psutil.Process:
        """One of those that compute; others of the family may be gone by now."""
        return next(each for each in self.family if "StageActor" in name_of(each))

    def assert_nothing_left(self) -> None:
        assert len(self.family) > 4  # two stages, and Ray's own processes
        _, alive = psutil.wait_procs(self.family, timeout=LEAVE_S)
        assert alive == []
        assert list(self.temp_dir.iterdir()) == []

    def _count_family(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))


@contextmanager
def demo(*flags: str) -> Iterator[Demo]:
    """The demo in a session of its own, as a terminal starts it; stderr goes to stdout."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        process = subprocess.Popen(
            [sys.executable, "launch/demo.py", *flags],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": folder, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running = Demo(process=process, temp_dir=Path(folder))
        try:
            yield running
        finally:
            for each in running.family:
                if each.is_running():
                    each.kill()
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def output() -> list[str]:
    """Of a whole run, which ends well and leaves nothing behind."""
    with demo() as running:
        assert running.end() == 0, running.lines
        running.assert_nothing_left()
    return running.lines


def test_every_question_is_answered(output: list[str]) -> None:
    assert sum(bool(re.match(r"[A-F] > \w", line)) for line in output) == 6
    for letter in "ABCDEF":
        text = " ".join(line[4:] for line in output if line.startswith(f"{letter} | "))
        assert len(text.split()) >= 3, output
    assert "Paris" in " ".join(output)


def test_the_tables_agree_with_the_answers(output: list[str]) -> None:
    said = [re.match(r"([A-F])   \((\d+) tokens, (stop|length)\)", line) for line in output]
    endings = sorted(match.groups() for match in said if match)
    cells = [line.split() for line in output]
    rows = [c for c in cells if len(c) == 7 and c[0] in "ABCDEF" and c[1].isdigit()]
    assert [(c[0], c[2], c[6]) for c in rows] == endings
    assert len(endings) == 6
    total = sum(int(tokens) for _, tokens, _ in endings)
    assert any(line.startswith(f"6 requests, {total} tokens in ") for line in output)
    assert any("Batches in flight: at most 2" in line for line in output)


def test_both_stages_computed_side_by_side(output: list[str]) -> None:
    """Somewhere in the picture one column holds two batches at once."""
    (first,) = (i for i, line in enumerate(output) if line.startswith("start    |0 ms"))
    above, below = output[first + 1], output[first + 2]
    assert above.startswith("stage 0  ")
    assert below.startswith("stage 1  ")
    assert above.index("[") < below.index("[")
    busy = [a not in "·" and b not in "·" for a, b in zip(above[9:-6], below[9:-6], strict=True)]
    assert sum(busy) > 5
    assert len(above) <= 120


def test_ctrl_c_while_answering_ends_all_of_it() -> None:
    with demo() as running:
        running.read("A > ")
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
        assert running.end() == 130, running.lines
        running.assert_nothing_left()
    assert not any("Traceback" in line for line in running.lines)


@pytest.mark.slow
def test_sigterm_while_starting_ends_all_of_it() -> None:
    with demo() as running:
        running.read("starting 2 stages")
        running.process.terminate()
        assert running.end() == 143, running.lines
        running.assert_nothing_left()
    assert not any("Traceback" in line for line in running.lines)


@pytest.mark.slow
def test_a_stage_that_dies_is_replaced_and_all_are_answered() -> None:
    with demo() as running:
        running.read("A > ")
        running.stage().kill()
        assert running.end() == 0, running.lines
        running.assert_nothing_left()
    assert any("is lost" in line for line in running.lines)
    assert any("recovered in" in line for line in running.lines)
    assert sum(bool(re.match(r"[A-F]   \(\d+ tokens", line)) for line in running.lines) == 6
    assert not any("Traceback" in line for line in running.lines)


def test_what_can_not_work_is_refused_at_once() -> None:
    with demo("--stages", "0") as running:
        assert running.end() == 2
    assert running.lines[-1].startswith("error: stages = 0")
