"""The engine master's watch, over a pipeline that answers nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from orca_dist.core import ReserveMemory, Scheduler, SchedulerConfig
from orca_dist.engine.master import EngineMaster
from orca_dist.engine.stages import Lost, News, Patrol, StageStatus
from orca_dist.engine.supervisor import Supervisor
from orca_dist.engine.trace import TraceLog
from orca_dist.errors import PipelineLost


@dataclass
class SilentPipeline:
    """Takes pings, and gives no sign of life."""

    stages: list[StageStatus] = field(default_factory=lambda: [StageStatus(0, range(1))])
    num_pings: int = 0

    def listen(self, tell: Callable[[News], None]) -> None:
        pass

    def give_up(self) -> None:
        pass

    def ping(self, nonce: int) -> None:
        self.num_pings += 1


@dataclass
class TwoStages(SilentPipeline):
    """Opens again once a second loss has been passed back to it."""

    stages: list[StageStatus] = field(
        default_factory=lambda: [StageStatus(0, range(1)), StageStatus(1, range(1, 2))]
    )
    epoch: int = 1
    passed_back: queue.SimpleQueue[News] = field(default_factory=queue.SimpleQueue)
    told: list[Callable[[News], None]] = field(default_factory=list)

    def listen(self, tell: Callable[[News], None]) -> None:
        self.told.append(tell)

    def hold(self) -> None:
        pass

    def pass_back(self, news: News) -> None:
        self.passed_back.put(news)

    def reopen(self, lost: Collection[int], deadline: float, patrol: Patrol) -> None:
        self.passed_back.get(timeout=20)

    def last_input_seq(self, stage: int) -> int:
        return 0


def make_master(pipeline: SilentPipeline, *, heartbeat_s: float, recovery: bool) -> EngineMaster:
    config = SchedulerConfig(inflight=1, max_batch_size=1, max_batch_tokens=16)
    num_stages = len(pipeline.stages)
    return EngineMaster(
        scheduler=Scheduler(config=config, memory=ReserveMemory(num_blocks=1, block_size=16)),
        pipeline=pipeline,  # type: ignore[arg-type]
        supervisor=Supervisor(
            num_stages=num_stages, heartbeat_s=heartbeat_s, step_limit_s=60, now=time.monotonic()
        ),
        trace=TraceLog(num_stages),
        recovery_timeout_s=20.0 if recovery else None,
    )


def test_a_stage_that_is_lost_just_before_a_recovery_begins_to_listen_is_not_forgotten() -> None:
    """Two die at once: both losses are in the master's inbox, and one recovery replaces both."""
    pipeline = TwoStages()
    master = make_master(pipeline, heartbeat_s=60.0, recovery=True)
    pauses: queue.SimpleQueue[bool] = queue.SimpleQueue()
    master.attach(deliver=lambda outputs: None, lose=lambda e: None, pause=pauses.put)
    master.start()
    for stage in (0, 1):
        pipeline.told[0](Lost(stage=stage, why="it was killed", life=0))
    assert [pauses.get(timeout=20), pauses.get(timeout=20)] == [True, False]
    master.close()


def test_one_who_keeps_asking_for_the_trace_does_not_stop_the_watch() -> None:
    pipeline = SilentPipeline()
    master = make_master(pipeline, heartbeat_s=0.4, recovery=False)
    lost: list[PipelineLost] = []
    told = threading.Event()
    master.attach(
        deliver=lambda outputs: None,
        lose=lambda e: (lost.append(e), told.set()),  # type: ignore[func-returns-value]
        pause=lambda paused: None,
    )
    master.start()
    deadline = time.monotonic() + 20
    while not told.is_set() and time.monotonic() < deadline:
        assert master.flush_trace(timeout_s=0.02) is False
    master.close()
    assert "no heartbeat" in str(lost[0])
    assert pipeline.num_pings > 0
