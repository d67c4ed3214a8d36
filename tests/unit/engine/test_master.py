"""The engine master's watch, over a pipeline that answers nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orca_dist.core import ReserveMemory, Scheduler, SchedulerConfig
from orca_dist.engine.master import EngineMaster
from orca_dist.engine.stages import News, StageStatus
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


def test_one_who_keeps_asking_for_the_trace_does_not_stop_the_watch() -> None:
    pipeline = SilentPipeline()
    memory = ReserveMemory(num_blocks=1, block_size=16)
    config = SchedulerConfig(inflight=1, max_batch_size=1, max_batch_tokens=16)
    master = EngineMaster(
        scheduler=Scheduler(config=config, memory=memory),
        pipeline=pipeline,  # type: ignore[arg-type]
        supervisor=Supervisor(num_stages=1, heartbeat_s=0.4, step_limit_s=60, now=time.monotonic()),
        trace=TraceLog(1),
        recovery_timeout_s=None,
    )
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
