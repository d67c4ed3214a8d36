"""From a lost stage to a new epoch: replace what is lost, connect all, within a deadline.

Runs on a thread of its own beside the engine master, which keeps its requests
meanwhile. The lost stage is killed first, so that the kernel closes its sockets and
its neighbours' waits end; the other stages keep their weights. Stages that are lost
during the recovery are replaced as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from orca_dist.engine.pipeline import Pipeline
from orca_dist.engine.stages import LinkBroken, StageLost
from orca_dist.engine.supervisor import Supervisor
from orca_dist.errors import OrcaError, PipelineLost
from orca_dist.proto.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

LINK_GRACE_S = 1.0  # for news of the stage at the other end of a broken link


class RecoveryPatrol:
    """Heartbeats and broken links while the pipeline is opened again."""

    def __init__(self, pipeline: Pipeline, supervisor: Supervisor) -> None:
        self._pipeline = pipeline
        self._supervisor = supervisor
        self._next_ping_s = 0.0
        self._broken: tuple[float, str] | None = None  # since when, what
        supervisor.reset(time.monotonic())

    def watch(self, connected: Collection[int]) -> None:
        """Raises StageLost for a silent stage, LinkBroken once a grace is over."""
        now = time.monotonic()
        for stage in range(self._pipeline.config.num_stages):
            if stage not in connected:  # its first sign of life has a deadline of its own
                self._supervisor.beat(stage, "", 0.0, now)
        if now >= self._next_ping_s:
            self._next_ping_s = now + self._supervisor.interval_s
            self._pipeline.ping(0)
        if verdict := self._supervisor.verdict(now):
            raise StageLost(self._pipeline.stages[verdict[0]], verdict[1])
        if self._broken and now - self._broken[0] > LINK_GRACE_S:
            raise LinkBroken(self._broken[1])

    def beat(self, stage: int, pong: pb.Pong) -> None:
        self._supervisor.beat(stage, pong.phase, pong.since_s, time.monotonic())

    def link_broke(self, status: str, why: str) -> None:
        self._broken = self._broken or (time.monotonic(), f"{status}: {why}")


def recover(
    pipeline: Pipeline, supervisor: Supervisor, lost: Collection[int], timeout_s: float
) -> set[int]:
    """Returns all stages that were replaced, once the pipeline is open again.

    Raises PipelineLost with the reason where it isn't within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    replaced = set(lost)
    pending: Collection[int] = lost
    while True:
        try:
            pipeline.reopen(pending, deadline, RecoveryPatrol(pipeline, supervisor))
            return replaced
        except StageLost as error:
            log.error("%s is lost, too: %s", error.stage, error.why)
            pending = {error.stage.index}
            replaced |= pending
        except LinkBroken as error:
            log.error("during recovery: %s", error)
            pending = ()
        except OrcaError as error:
            raise PipelineLost(
                f"recovery did not succeed within recovery_timeout_s = {timeout_s:g} s: {error}"
            ) from None
        if time.monotonic() > deadline:
            raise PipelineLost(
                f"recovery did not succeed within recovery_timeout_s = {timeout_s:g} s"
            )
