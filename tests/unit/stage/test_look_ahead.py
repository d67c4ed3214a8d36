"""The next plan's input is awaited while this one's layers are computed."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch

from orca_dist.engine.wire import encode_plan
from orca_dist.proto.v1.control_pb2 import MasterMessage, Result, StageMessage
from orca_dist.stage.batch import PackedBatch
from orca_dist.stage.process import ComputeThread
from orca_dist.stage.worker import StageWorker
from orca_dist.transport.loopback import LoopbackArrival, LoopbackChannel
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import load_stages, mixed_plans, run_stage

WAIT_S = 60.0


class CountingChannel(LoopbackChannel):
    """Knows how many receives were posted."""

    num_posted = 0

    def post_recv(self, x_TH: torch.Tensor) -> LoopbackArrival:
        self.num_posted += 1
        return super().post_recv(x_TH)


class WatchedWorker(StageWorker):
    """Notes after each batch how many receives have been posted on its link."""

    def __init__(self, *, host: str) -> None:
        super().__init__(host=host)
        self.link = CountingChannel(WAIT_S)
        self.posted: list[int] = []

    def compute(self, x_TH: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        y_TH = super().compute(x_TH, batch)
        self.posted.append(self.link.num_posted)
        return y_TH


@pytest.fixture
def stages(tmp_path: Path) -> tuple[StageWorker, WatchedWorker]:
    """The first stage sends to the watched one."""
    first, second = load_stages(loud_llama(tmp_path), 2, make_worker=WatchedWorker)
    assert isinstance(second, WatchedWorker)
    first.begin(None, second.link, num_blocks=64)
    second.begin(second.link, None, num_blocks=64)
    return first, second


def test_the_next_receive_is_posted_before_this_batch_is_done(
    stages: tuple[StageWorker, WatchedWorker],
) -> None:
    first, second = stages
    plans = mixed_plans()
    told: queue.SimpleQueue[StageMessage] = queue.SimpleQueue()
    thread = ComputeThread(second, told.put)
    for plan in plans:
        thread.put(MasterMessage.FromString(encode_plan(plan)))
        run_stage(first, plan)
    thread.start()
    got = [told.get(timeout=WAIT_S).result for _ in plans]
    thread.leave()
    assert second.posted == [2, 2]
    assert got == _one_by_one(stages)


def test_a_plan_that_comes_later_is_waited_for(stages: tuple[StageWorker, WatchedWorker]) -> None:
    first, second = stages
    told: queue.SimpleQueue[StageMessage] = queue.SimpleQueue()
    thread = ComputeThread(second, told.put)
    thread.start()
    for plan in mixed_plans():
        thread.put(MasterMessage.FromString(encode_plan(plan)))
        run_stage(first, plan)
        assert told.get(timeout=WAIT_S).result.seq == plan.seq
    thread.leave()
    assert second.posted == [1, 2]


def _one_by_one(stages: tuple[StageWorker, WatchedWorker]) -> list[Result | None]:
    first, second = stages
    link = LoopbackChannel(WAIT_S)
    first.begin(None, link, num_blocks=64)
    worker = second.fresh()
    worker.look_ahead = lambda: None
    worker.begin(link, None, num_blocks=64)
    results = []
    for plan in mixed_plans():
        run_stage(first, plan)
        results.append(run_stage(worker, plan))
    return results
