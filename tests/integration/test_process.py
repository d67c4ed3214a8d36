"""A stage on its control stream: setup, open, plans and pings over real gRPC, on threads."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orca_dist.bootstrap import StageBootstrap
from orca_dist.engine.control import ControlPlane
from orca_dist.engine.wire import encode_plan
from orca_dist.proto.v1 import control_pb2 as pb
from orca_dist.stage.batch import PackedBatch
from orca_dist.stage.process import serve_stage
from orca_dist.stage.worker import StageWorker
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import mixed_plans, stage_setup

WAIT_S = 30.0
HOST = "127.0.0.1"


class HeldWorker(StageWorker):
    """Computes only while `go` is set."""

    def __init__(self) -> None:
        super().__init__(host=HOST)
        self.computing, self.go = threading.Event(), threading.Event()
        self.go.set()

    def compute(self, x_TH: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        self.computing.set()
        assert self.go.wait(WAIT_S)
        return super().compute(x_TH, batch)


class Run:
    """One stage of one, served on a thread; `closed` is what serve_stage() returned."""

    def __init__(self, folder: Path) -> None:
        self.worker = HeldWorker()
        self.closed: list[bool] = []
        self._folder = folder
        self._news: queue.SimpleQueue[pb.StageMessage | str] = queue.SimpleQueue()
        self.plane = ControlPlane(
            host=HOST,
            secret="s",
            num_stages=1,
            on_message=lambda stage, message: self._news.put(message),
            on_broken=lambda stage, why: self._news.put(why),
        )
        bootstrap = StageBootstrap(
            stage=0, control_address=self.plane.address, secret="s", host=HOST
        )
        self.thread = threading.Thread(
            target=lambda: self.closed.append(serve_stage(bootstrap, self.worker))
        )
        self.thread.start()
        self.answer("hello")

    def say(self, message: pb.MasterMessage) -> None:
        self.plane.send(0, message)

    def answer(self, kind: str) -> pb.StageMessage:
        """The next message, which must be of this kind; how far loading is doesn't count."""
        message = self._news.get(timeout=WAIT_S)
        assert isinstance(message, pb.StageMessage), message
        if message.WhichOneof("kind") == "load_progress":
            return self.answer(kind)
        assert message.WhichOneof("kind") == kind, message
        return message

    def load_and_open(self) -> None:
        setup = stage_setup(self._folder, 0, [range(5)], "float32")
        self.say(pb.MasterMessage(setup=setup))
        assert self.answer("loaded").loaded.weight_bytes > 0
        self.say(pb.MasterMessage(open=pb.Open(epoch=1, num_blocks=64, link_timeout_s=5.0)))
        self.answer("ready")

    def ping(self, nonce: int) -> pb.Pong:
        self.say(pb.MasterMessage(ping=pb.Ping(nonce=nonce)))
        return self.answer("pong").pong

    def end(self) -> None:
        self.worker.go.set()
        self.plane.close(grace_s=0.0)
        self.thread.join(WAIT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    run = Run(folder)
    yield run
    run.end()


def test_a_plan_is_answered_with_a_token_an_entry(run: Run) -> None:
    run.load_and_open()
    for plan in mixed_plans():
        run.plane.broadcast(encode_plan(plan))
        result = run.answer("result").result
        assert (result.seq, list(result.ids)) == (plan.seq, plan.ids)
        assert len(result.tokens) == len(plan.ids)


def test_pings_are_answered_while_the_stage_computes(run: Run) -> None:
    run.load_and_open()
    first, second = mixed_plans()
    run.worker.go.clear()
    run.plane.broadcast(encode_plan(first))
    assert run.worker.computing.wait(WAIT_S)
    busy = run.ping(1)
    assert (busy.nonce, busy.phase, len(busy.trace.seq)) == (1, "computing", 0)
    assert run.ping(2).since_s > busy.since_s >= 0
    run.worker.go.set()
    run.answer("result")
    run.plane.broadcast(encode_plan(second))
    run.answer("result")
    idle = _idle(run)
    assert idle.last_seq == second.seq


def test_what_an_epoch_was_computing_at_its_end_is_no_hang_of_the_next(run: Run) -> None:
    run.load_and_open()
    first, _ = mixed_plans()
    run.worker.go.clear()
    run.plane.broadcast(encode_plan(first))
    assert run.worker.computing.wait(WAIT_S)
    assert run.ping(1).phase == "computing"
    run.say(pb.MasterMessage(open=pb.Open(epoch=2, num_blocks=64, link_timeout_s=5.0)))
    assert run.answer("ready").epoch == 2
    assert run.ping(2).phase == "idle"


def _idle(run: Run) -> pb.Pong:
    """The first pong after the compute thread has let go of its last plan."""
    deadline = time.monotonic() + WAIT_S
    while (pong := run.ping(9)).phase != "idle":
        assert time.monotonic() < deadline
    return pong


def test_trace_rows_come_with_pongs_each_once(run: Run) -> None:
    run.load_and_open()
    plans = mixed_plans()
    for plan in plans:
        run.plane.broadcast(encode_plan(plan))
        run.answer("result")
    seqs: list[int] = []
    while len(seqs) < len(plans):
        seqs += run.ping(1).trace.seq
    assert seqs == [plan.seq for plan in plans]
    assert list(run.ping(2).trace.seq) == []


def test_a_plan_that_cannot_run_is_a_failure_with_its_traceback(run: Run) -> None:
    """And the control thread still answers."""
    run.load_and_open()
    _, second = mixed_plans()
    run.plane.broadcast(encode_plan(second))
    failure = run.answer("failure").failure
    assert failure.message.startswith("KeyError")
    assert "apply" in failure.traceback
    assert run.ping(3).nonce == 3
    assert run.thread.is_alive()


def test_a_folder_that_cannot_be_loaded_is_a_failure(run: Run, tmp_path: Path) -> None:
    setup = stage_setup(tmp_path, 0, [range(5)], "float32")
    run.say(pb.MasterMessage(setup=setup))
    assert "config.json" in run.answer("failure").failure.message


ROWS_OF_ALL_KINDS = """
import psutil, torch
from orca_kernels.linear import TorchLinear
from orca_dist.stage.process import bound_kernel_caches
bound_kernel_caches()
linear = TorchLinear(torch.ones(64, 64))
before = psutil.Process().memory_info().rss
with torch.inference_mode():
    for num_rows in range(2, 602):
        linear(torch.ones(num_rows, 64))
print((psutil.Process().memory_info().rss - before) / 1e6)
"""


def test_kernels_of_all_shapes_do_not_pile_up() -> None:
    """0.6 MB each; 600 of them would be 350 MB."""
    program = [sys.executable, "-c", ROWS_OF_ALL_KINDS]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 250


def test_close_ends_the_stage_well(run: Run) -> None:
    run.say(pb.MasterMessage(close=pb.Close()))
    run.thread.join(WAIT_S)
    assert run.closed == [True]


def test_a_master_that_hangs_up_ends_the_stage(run: Run) -> None:
    run.plane.close(grace_s=0.0)
    run.thread.join(WAIT_S)
    assert run.closed == [False]
