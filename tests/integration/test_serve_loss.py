"""`orca-dist serve` loses a stage: what clients, health, the log and the caller of the command see.

A script model without an end, so that what runs can only end by the loss. Each server
ends with its test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orca_dist import Client, SamplingParams
from orca_dist.client.results import Chunk, StageInfo
from orca_dist.core import FinishReason
from orca_dist.errors import OrcaError, PipelineLost, ServerUnavailable
from tests.fixtures.checkpoints import FIRST_LETTER, letter, script_llama
from tests.fixtures.serving import BROKEN, END_S, Serving, gone, serve_command, serving

LIMIT_S = 10.0
START_LIMIT_S = 60.0
ENDLESS = SamplingParams(max_tokens=1000)
ROOM_FOR_FOUR = "4032"  # requests of 1001 tokens, in blocks of 16
A = [letter("A")]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


OFF = ("--recovery", "off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script_llama(tmp_path_factory.mktemp("script"), _next, max_model_len=2048)


def _next(token: int) -> int:
    """A..Z in a circle; any other id is followed by A."""
    return FIRST_LETTER + (token - FIRST_LETTER + 1) % 26 if token >= FIRST_LETTER else FIRST_LETTER


def test_killed_under_load(folder: Path) -> None:
    """A1, A4, A5, A6, K2: four streams and one that waits, and links that would wait 300 s."""
    flags = ("--stages", "3", *OFF, "--kv-tokens", ROOM_FOR_FOUR, "--link-timeout-s", "300")
    with (
        serving(folder, *flags) as server,
        Client(server.address) as client,
        _watch(server) as health,
    ):
        processes, stages = server.children(), client.info().stages
        streams = [client.stream(A, ENDLESS) for _ in range(4)]
        for stream in streams:
            next(stream)
        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(_outcome, stream) for stream in streams]
            calls.append(pool.submit(_outcome, client.stream(A, ENDLESS)))
            client.info()  # the fifth is there: calls of one connection arrive in order
            killed = time.monotonic()
            os.kill(stages[1].pid, signal.SIGKILL)
            outcomes = [call.result(LIMIT_S) for call in calls]
        assert all(isinstance(error, PipelineLost) for _, error in outcomes)
        assert all(FinishReason.STOP not in reasons for reasons, _ in outcomes)
        assert health.get(timeout=LIMIT_S) == NOT_SERVING
        assert time.monotonic() - killed < LIMIT_S
        _ended(server, processes, f"stage 1 (pid {stages[1].pid}, node {stages[1].node})")


@pytest.mark.slow
def test_killed_while_idle(folder: Path) -> None:
    """A2: health turns without anyone asking for anything; a new call doesn't wait."""
    with serving(folder, "--stages", "3", *OFF) as server, _watch(server) as health:
        processes, stage = server.children(), _stage(server, 2)
        os.kill(stage.pid, signal.SIGKILL)
        assert health.get(timeout=LIMIT_S) == NOT_SERVING
        with Client(server.address) as client, pytest.raises((PipelineLost, ServerUnavailable)):
            client.generate(A, ENDLESS, timeout_s=LIMIT_S)
        _ended(server, processes, f"stage 2 (pid {stage.pid}, node {stage.node})")


@pytest.mark.slow
def test_idle_for_long_and_then_stopped(folder: Path) -> None:
    """A8: no time limit runs in an idle pipeline. A3: SIGSTOP is noticed, SIGCONT too late."""
    limits = ("--heartbeat-s", "2", "--step-limit-s", "2", "--link-timeout-s", "3")
    with (
        serving(folder, "--stages", "3", *OFF, *limits) as server,
        Client(server.address) as client,
        _watch(server) as health,
    ):
        processes, stage = server.children(), _stage(server, 1)
        time.sleep(4.0)
        assert client.generate(A, SamplingParams(max_tokens=3)).text == "BCD"
        assert client.health()
        stream = client.stream(A, ENDLESS)
        next(stream)
        os.kill(stage.pid, signal.SIGSTOP)
        reasons, error = _outcome(stream)
        os.kill(stage.pid, signal.SIGCONT)
        assert isinstance(error, PipelineLost)
        assert "heartbeat" in str(error)
        assert reasons == {None}
        assert health.get(timeout=LIMIT_S) == NOT_SERVING
        _ended(server, processes, f"stage 1 (pid {stage.pid}, node {stage.node})")


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        (1, signal.SIGKILL),
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_with_recovery_streams_only_pause(folder: Path, stage: int, how: signal.Signals) -> None:
    """K2: four streams and one that waits; no call fails, health says what is going on, the log
    names the stage once, and the command serves on. A stopped stage wakes too late to matter."""
    flags = ("--stages", "3", "--kv-tokens", ROOM_FOR_FOUR, "--heartbeat-s", "2")
    with (
        serving(folder, *flags) as server,
        Client(server.address) as client,
        _watch(server) as health,
    ):
        stages = client.info().stages
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        streams = [client.stream(A, params) for _ in range(5)]
        for stream in streams[:4]:
            next(stream)
        os.kill(stages[stage].pid, how)
        assert health.get(timeout=LIMIT_S) == NOT_SERVING
        with suppress(ProcessLookupError):
            os.kill(stages[stage].pid, signal.SIGCONT)
        asked = client.stream(A, SamplingParams(max_tokens=3))  # queues up meanwhile
        assert health.get(timeout=END_S) == SERVING
        for stream in streams[:4]:
            assert "".join(chunk.text for chunk in stream) == _alphabet(400)[1:]
        assert "".join(chunk.text for chunk in streams[4]) == _alphabet(400)
        assert "".join(chunk.text for chunk in asked) == "BCD"
        after = client.info()
        assert after.epoch == 2
        same = [old.pid == new.pid for old, new in zip(stages, after.stages, strict=True)]
        assert same == [index != stage for index in range(3)]
        assert "recovered in" in _lost_once(server, stages[stage])


@pytest.mark.slow
def test_with_recovery_an_idle_server_heals_by_itself(folder: Path) -> None:
    """K2, A2: health turns twice without anyone asking for anything; a call meanwhile waits."""
    with (
        serving(folder, "--stages", "3") as server,
        Client(server.address) as client,
        _watch(server) as health,
    ):
        stage = _stage(server, 1)
        os.kill(stage.pid, signal.SIGKILL)
        assert health.get(timeout=LIMIT_S) == NOT_SERVING
        answer = client.generate(A, SamplingParams(max_tokens=3), timeout_s=END_S)
        assert answer.text == "BCD"
        assert health.get(timeout=END_S) == SERVING
        _lost_once(server, stage)


@pytest.mark.slow
def test_with_recovery_idleness_is_no_fault(folder: Path) -> None:
    """A8: idle for longer than any limit, before a recovery and after it."""
    limits = ("--heartbeat-s", "1", "--step-limit-s", "1", "--link-timeout-s", "2")
    with (
        serving(folder, "--stages", "3", *limits) as server,
        Client(server.address) as client,
        _watch(server) as health,
    ):
        for epoch in (1, 2):
            time.sleep(4.0)
            assert client.generate(A, SamplingParams(max_tokens=3)).text == "BCD"
            assert client.info().epoch == epoch
            if epoch == 1:
                os.kill(_stage(server, 1).pid, signal.SIGKILL)
                assert health.get(timeout=LIMIT_S) == NOT_SERVING
                assert health.get(timeout=END_S) == SERVING


def _alphabet(count: int) -> str:
    """What the model says after A."""
    return "".join(chr(ord("A") + (1 + i) % 26) for i in range(count))


def _lost_once(server: Serving, stage: StageInfo) -> str:
    """Ends the server, whose log says once that the stage was lost; returns the log."""
    server.process.terminate()
    code, err = server.end()
    assert code == 143
    assert "Traceback" not in err
    (lost,) = (line for line in err.splitlines() if " ERROR " in line and " is lost: " in line)
    assert f"stage {stage.index} (pid {stage.pid}, node {stage.node})" in lost
    return err


def test_a_stage_that_can_not_load_ends_the_start(folder: Path) -> None:
    """A7: its traceback is printed, and no port is ever told."""
    run = subprocess.run(
        serve_command(folder, "--stages", "2", module=BROKEN),
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert (run.returncode, run.stdout) == (3, "")
    assert "Traceback" in run.stderr
    assert re.search(r"broken_stage.*\n.*raise OSError", run.stderr)
    last = run.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"error: stage 1 \(pid \d+, node \S+\) did not start: OSError: no room on this shelf", last
    )
    pid = int(re.findall(r"pid (\d+)", last)[0])
    assert not psutil.pid_exists(pid)


@contextmanager
def _watch(server: Serving) -> Iterator[SimpleQueue[int]]:
    """What the health service says by itself from now on, when it is SERVING."""
    with grpc.insecure_channel(server.address) as channel:
        answers = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        statuses: SimpleQueue[int] = SimpleQueue()
        reader = threading.Thread(target=_read, args=(answers, statuses), daemon=True)
        reader.start()
        assert statuses.get(timeout=LIMIT_S) == SERVING
        yield statuses
        answers.cancel()
        reader.join(LIMIT_S)


def _read(answers: Iterator[health_pb2.HealthCheckResponse], statuses: SimpleQueue[int]) -> None:
    with suppress(grpc.RpcError):
        for answer in answers:
            statuses.put(answer.status)


def _stage(server: Serving, index: int) -> StageInfo:
    with Client(server.address) as client:
        return client.info().stages[index]


def _outcome(chunks: Iterator[Chunk]) -> tuple[set[FinishReason | None], OrcaError | None]:
    """The finish reasons that a stream has shown, and the error it ended with."""
    reasons: set[FinishReason | None] = {None}
    try:
        for chunk in chunks:
            reasons.add(chunk.finish_reason)
    except OrcaError as error:
        return reasons, error
    return reasons, None


def _ended(server: Serving, processes: Sequence[psutil.Process], stage: str) -> None:
    """The command ends with code 4, says once which stage was lost, and leaves no process."""
    code, err = server.end()
    assert code == 4
    assert "Traceback" not in err
    lost = [line for line in err.splitlines() if " ERROR " in line and " is lost: " in line]
    assert len(lost) == 1
    assert stage in lost[0]
    assert err.splitlines()[-1] == f"error: {lost[0][lost[0].index(stage) :]}"
    assert len(processes) == 3
    assert gone(list(processes), END_S)
