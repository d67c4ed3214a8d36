"""`orca-dist serve` as a user runs it, local stages, from start to every kind of end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from orca_dist import Client, SamplingParams
from orca_dist.errors import ServerUnavailable
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.serving import command, gone, serving

START_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


def test_answers_info_and_sigterm(folder: Path) -> None:
    with serving(folder, "--stages", "2", "--kv-tokens", "2048") as server:
        pids, processes = server.stage_pids(), server.children()
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
        code, err = server.end()
        assert code == 143
        assert "Traceback" not in err
        assert gone(processes, 5)


def test_killed_driver_leaves_no_stage(folder: Path) -> None:
    """A8: a client whose server is gone is told so; the stages notice by themselves."""
    with serving(folder, "--stages", "2") as server, Client(server.address) as client:
        stages = server.children()
        stream = client.stream([5, 9], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        server.process.kill()
        with pytest.raises(ServerUnavailable, match=server.address):
            list(stream)
        assert len(stages) == 2
        assert gone(stages, 15)


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
