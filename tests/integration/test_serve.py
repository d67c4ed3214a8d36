"""`orca-dist serve` as a user runs it, local stages, from start to every kind of end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from orca_dist import Client, SamplingParams
from orca_dist.errors import PipelineLost
from tests.fixtures.checkpoints import loud_llama

START_S, END_S = 90.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    process: subprocess.Popen[str]
    address: str

    def stage_pids(self) -> list[int]:
        with Client(self.address) as client:
            return [stage.pid for stage in client.info(timeout_s=10).stages]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orca_dist", *arguments]


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Serving]:
    process = subprocess.Popen(
        command("serve", str(folder), "--launcher", "local", "--port", "0", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        word, address = process.stdout.readline().split()
        assert word == "ready"
        yield Serving(process=process, address=address)
    finally:
        process.kill()
        process.communicate()


def gone(pids: list[int], within_s: float) -> bool:
    """Whether all processes end in time (those that are ours may linger as zombies)."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=within_s)[1]


def test_answers_info_and_sigterm(folder: Path) -> None:
    with serving(folder, "--stages", "2", "--kv-tokens", "2048") as server:
        pids = server.stage_pids()
        generate = command(
            "generate", "Hello", "--address", server.address, "--max-tokens", "5", "--json"
        )
        run = subprocess.run(generate, capture_output=True, text=True, timeout=60, check=True)
        answer = json.loads(run.stdout)
        assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) <= 5
        info = subprocess.run(
            command("info", "--address", server.address, "--json"),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        stages = json.loads(info.stdout)["stages"]
        assert [stage["pid"] for stage in stages] == pids
        assert [stage["layers"] for stage in stages] == [[0, 1, 2], [3, 4]]
        server.process.send_signal(signal.SIGTERM)
        out, err = server.process.communicate(timeout=END_S)
        assert (server.process.returncode, out) == (143, "")
        assert "Traceback" not in err
        assert gone(pids, 5)


def test_killed_stage_ends_the_server(folder: Path) -> None:
    """A1: the stream ends with UNAVAILABLE, the process with code 4, no stage is left."""
    with serving(folder, "--stages", "3") as server, Client(server.address) as client:
        pids = server.stage_pids()
        stream = client.stream([5, 9], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(PipelineLost, match="stage 1"):
            list(stream)
        _, err = server.process.communicate(timeout=END_S)
        assert server.process.returncode == 4
        assert f"stage 1 (pid {pids[1]}" in err
        assert gone(pids, 5)


def test_killed_driver_leaves_no_stage(folder: Path) -> None:
    with serving(folder, "--stages", "2") as server:
        pids = server.stage_pids()
        server.process.kill()
        assert gone(pids, 15)


def test_port_in_use_costs_no_start(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        started = time.monotonic()
        run = subprocess.run(
            command("serve", str(folder), "--launcher", "local", "--port", str(port)),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    assert run.returncode == 3
    assert str(port) in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert time.monotonic() - started < START_S


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--stages", "6"], 2, ["6", "5 layers"]),
        (["--split", "2", "2"], 2, ["4 layers", "5"]),
        (["--max-model-len", "999"], 2, ["999", "256"]),
    ],
)
def test_impossible_settings(folder: Path, flags: list[str], code: int, words: list[str]) -> None:
    run = subprocess.run(
        command("serve", str(folder), "--launcher", "local", "--port", "0", *flags),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert run.returncode == code
    assert all(word in run.stderr for word in words)
    assert len(run.stderr.splitlines()) == 1


def test_missing_model() -> None:
    run = subprocess.run(
        command("serve", "/no/such/model", "--port", "0"),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert run.returncode == 3
    assert "/no/such/model" in run.stderr
