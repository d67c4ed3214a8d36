"""launch/slurm.sbatch without Slurm and Ray, for what two real nodes can't show.

Four nodes of which one may never start; job ids of our choice; a temporary folder whose name is
far too long; a Slurm that calls no GPUs by a word of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from orca_dist.cli.slurm import job_folder, own_addresses
from tests.fixtures.serving import gone
from tests.fixtures.slurm import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STUB = ROOT / "tests" / "fixtures" / "stub_slurm"
END_S = 60.0
SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StubJob:
    """The script as a process, and what it called."""

    process: subprocess.Popen[str]
    folder: Path
    job_folder: Path

    def calls(self, number: int) -> list[dict[str, Any]]:
        """The first calls of `ray start`, once there are as many."""
        command = ["tail", "--lines=+1", "--follow=name", "--retry", str(self.folder / "calls")]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as tail:
            assert tail.stdout is not None
            calls = [json.loads(tail.stdout.readline()) for _ in range(number)]
            tail.kill()
        return calls

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._owns(p)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("STUB_FOLDER") == str(self.folder)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=END_S)
        assert self.processes() == []
        assert not self.job_folder.exists()
        return self.process.returncode, err


@contextmanager
def submitted(
    folder: Path, job_id: int, *, absent: str = "", start_timeout_s: float = 60, **more: str
) -> Iterator[StubJob]:
    folder.mkdir()
    (folder / "orca.yaml").write_text(f"start_timeout_s: {start_timeout_s}\n")
    shutil.copy(shutil.which("sleep") or "", folder / "raylet")
    process = subprocess.Popen(
        ["bash", ROOT / "launch" / "slurm.sbatch"],
        cwd=folder,
        env=_environment(folder, job_id) | {"STUB_ABSENT": absent} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    temp_dir = more.get("TMPDIR", tempfile.gettempdir())
    job = StubJob(process=process, folder=folder, job_folder=job_folder(job_id, temp_dir))
    try:
        yield job
    finally:
        process.terminate()
        try:
            process.communicate(timeout=END_S)
        finally:
            for left in job.processes():
                left.kill()


def _environment(folder: Path, job_id: int) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{STUB}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{STUB}:{ROOT}:{ROOT / 'kernels'}",
        "STUB_FOLDER": str(folder),
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NODELIST": "gpu[01-03,07]",
        "SLURMD_NODENAME": "gpu01",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_GPUS_ON_NODE": "4",
    }


def by_node(calls: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The flags of each node's `ray start`."""
    flags = [dict(pairwise(call["words"])) for call in calls]
    return {each["--node-name"]: each for each in flags}


def test_a_node_that_never_joins_is_named(tmp_path: Path) -> None:
    with submitted(tmp_path / "a", 1234, absent="gpu07", start_timeout_s=30) as job:
        calls = by_node(job.calls(3))
        code, err = job.end()
    assert code == 3
    assert err.splitlines()[-1].startswith("error: nodes gpu07 have not joined within 30 s")
    assert [node for node, flags in calls.items() if "--head" in flags] == ["gpu01"]
    head = calls["gpu01"]
    assert head["--node-ip-address"] in own_addresses()
    address = f"{head['--node-ip-address']}:{head['--port']}"
    assert {calls[node]["--address"] for node in ("gpu02", "gpu03")} == {address}
    assert {flags["--num-cpus"] for flags in calls.values()} == {"16"}
    assert {flags["--num-gpus"] for flags in calls.values()} == {"4"}


def test_two_jobs_meet_nowhere_and_sigterm_ends_one_of_them(tmp_path: Path) -> None:
    with (
        submitted(tmp_path / "a", 1234, absent="gpu07", TMPDIR="/tmp/" + "x" * 85) as one,
        submitted(tmp_path / "b", 1235, absent="gpu07", TMPDIR=str(tmp_path)) as other,
    ):
        calls, theirs = one.calls(3), other.calls(3)
        head, neighbour = by_node(calls)["gpu01"], by_node(theirs)["gpu01"]
        for flag in ("--port", "--ray-client-server-port", "--temp-dir"):
            assert head[flag] != neighbour[flag]
        tokens = {call["env"]["RAY_AUTH_TOKEN"] for call in [*calls, *theirs]}
        assert len(tokens) == 2
        assert all(int(call["blocked"], 16) & SIGTERM_BIT for call in calls)
        assert head["--temp-dir"] == "/tmp/orca-1234/r"
        mine, running = one.processes(), other.processes()
        one.process.terminate()
        assert one.end()[0] == 143
        assert gone(mine, END_S)
        assert all(process.is_running() for process in running)
        assert len(other.processes()) == len(running)


def test_no_gpus_is_no_gpu(tmp_path: Path) -> None:
    none = {"SLURM_GPUS_ON_NODE": "", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    with submitted(tmp_path / "a", 1236, absent="gpu02,gpu03,gpu07", **none) as job:
        (call,) = job.calls(1)
        assert by_node([call])["gpu01"]["--num-gpus"] == "0"
        assert "CUDA_VISIBLE_DEVICES" not in call["env"]


def test_a_node_that_can_not_start_ray_ends_the_job(tmp_path: Path) -> None:
    with submitted(tmp_path / "a", 1237, STUB_FAILS="gpu03") as job:
        code, err = job.end()
    assert code == 3
    assert "no room here\n" in err
    assert "error: node gpu03: `ray start` ended with 1; what it said is above" in err
    assert err.splitlines()[-1] == ("error: Ray can't run on node gpu03; its reason is above")
