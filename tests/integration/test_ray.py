"""The same pipeline on a real Ray: one private cluster for the module, four CPU stages."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
import ray

from orca_dist import SamplingParams
from orca_dist.config import EngineConfig
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import live, local_config
from tests.fixtures.served import Served, served
from tests.fixtures.serving import gone

pytestmark = pytest.mark.ray

STAGES = 4
LEFT_S = 60.0  # for the last worker of a Ray that was told to go, on a busy machine
PROMPTS = [[5, 9, 17], [300], list(range(40, 77))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def _ray_config() -> EngineConfig:
    return local_config(STAGES, launcher="ray", heartbeat_s=5.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loud")
    loud_llama(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """The answers of a single local stage."""
    with live(folder, local_config(1)) as front:
        return [tuple(answer.tokens) for answer in front.generate(PROMPTS, 24)]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    """Checks at its end that no process and no file of the run is left."""
    before = _children()
    with _own_temp_dir() as temp_dir:
        with served(folder, _ray_config()) as server:
            ours = _children() - before
            yield server
        assert len(ours) > STAGES
        assert gone(list(ours), LEFT_S)
        assert list(temp_dir.iterdir()) == []
        assert not ray.is_initialized()


@contextmanager
def _own_temp_dir() -> Iterator[Path]:
    """A short temporary folder of this module's own, where private Rays go."""
    with tempfile.TemporaryDirectory(prefix="t") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_answers_equal_one_local_stage(server: Served, expected: list[tuple[int, ...]]) -> None:
    with server.client() as client:
        answers = [client.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    assert answers == expected


def test_info_shows_four_actors(server: Served) -> None:
    command = [sys.executable, "-m", "orca_dist", "info", "--address", server.address, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    info = json.loads(run.stdout)
    stages = info["stages"]
    assert info["schema"] == 1
    assert [stage["index"] for stage in stages] == [0, 1, 2, 3]
    assert len({stage["pid"] for stage in stages}) == STAGES
    assert len({stage["actor_id"] for stage in stages if stage["actor_id"]}) == STAGES
    assert all(psutil.pid_exists(stage["pid"]) for stage in stages)
    assert all(stage["state"] == "ready" for stage in stages)


def test_no_ray_call_between_two_tokens(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at every door through which the driver can call Ray."""
    calls: list[str] = []

    def counting(name: str, real: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return real(*args, **kwargs)  # type: ignore[operator]

        return call

    for name in ("get", "put", "wait", "kill", "cancel"):
        monkeypatch.setattr(ray, name, counting(name, getattr(ray, name)))
    method = ray.actor.ActorMethod
    monkeypatch.setattr(method, "_remote", counting("remote", method._remote))
    with server.client() as client:
        answer = client.generate(PROMPTS[0], PARAMS)
    assert len(answer.token_ids) == 24
    assert calls == []


def test_four_batches_in_flight(server: Served) -> None:
    from orca_dist.metrics.trace import in_flight

    seen = len(server.plans())
    with server.client() as client:
        streams = [client.stream([i, i + 1], PARAMS) for i in range(8)]
        for stream in streams:
            list(stream)
    plans = server.plans()[seen:]
    assert max(count for _, count in in_flight(plans)) == STAGES


def test_a_killed_actor_is_replaced_and_streams_go_on(
    server: Served, expected: list[tuple[int, ...]]
) -> None:
    """Stage 1 under load; the others keep their weights, and what it said last is told."""
    with server.client() as client, _errors() as errors:
        streams = [client.stream(prompt, PARAMS) for prompt in PROMPTS]
        begun = [next(stream).token_ids for stream in streams]
        before = server.engine.info()
        pid = before.stages[1].pid
        _write_to_stderr(pid, [f"line {number}" for number in range(60)])
        os.kill(pid, signal.SIGKILL)
        answers = [
            (*first, *(token for chunk in stream for token in chunk.token_ids))
            for first, stream in zip(begun, streams, strict=True)
        ]
        assert answers == expected
        after = server.engine.info()
        assert after.epoch == before.epoch + 1
        same = [old.pid == new.pid for old, new in zip(before.stages, after.stages, strict=True)]
        assert same == [True, False, True, True]
        first, *lines = _awaited(errors, "the last lines of stage").splitlines()
        assert first == "the last lines of stage 1:"
        assert lines == [f"line {number}" for number in range(10, 60)]


@contextmanager
def _errors() -> Iterator[SimpleQueue[str]]:
    """What is logged as an error in the block, as it comes."""
    messages: SimpleQueue[str] = SimpleQueue()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.put(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)


def _awaited(messages: SimpleQueue[str], start: str) -> str:
    """The next message that begins so."""
    return next(m for m in iter(lambda: messages.get(timeout=10), None) if m.startswith(start))


def _write_to_stderr(pid: int, lines: list[str]) -> None:
    """As if the process had written them."""
    with Path(f"/proc/{pid}/fd/2").open("a") as stderr:
        stderr.writelines(f"{line}\n" for line in lines)
