"""Runs a StageWorker on a control stream: a control thread and a compute thread.

The control thread (the caller's) answers pings at once, whatever the compute
thread is stuck in, and ends the stage when the master hangs up. As a script it
is the local launcher's stage process; its bootstrap comes as JSON on stdin, so
that no secret stands on a command line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable

from orca_dist.bootstrap import StageBootstrap
from orca_dist.errors import OrcaError
from orca_dist.logs import Origin, set_up_logging
from orca_dist.proto.v1.control_pb2 import (
    Failure,
    LoadProgress,
    MasterMessage,
    Ping,
    Plan,
    Pong,
    Ready,
    StageMessage,
)
from orca_dist.stage.control import ControlLink, hello
from orca_dist.stage.worker import EpochOver, Iteration, StageWorker
from orca_dist.transport.channel import LinkError

log = logging.getLogger(__name__)

Job = tuple[MasterMessage, float]  # a message and when it arrived

# A compiled kernel for each matrix shape and number of rows takes about 0.6 MB, and each of these
# two caches would keep 1024. So many serve decoding with up to 32 rows; others are compiled again.
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
MAX_KERNELS = "256"


class ComputeThread:
    """Takes messages in order; the first exception is reported and ends it.

    While a batch is computed, the plan after it is taken in as soon as it is there.

    One loads the stage, then there is one for each epoch. `leave` gives up an epoch's: it ends
    as soon as it can, is not waited for, and nobody hears of it any more.
    """

    def __init__(
        self, worker: StageWorker, send: Callable[[StageMessage], None], *, epoch: int = 0
    ) -> None:
        self.worker = worker
        worker.look_ahead = self._look_ahead
        self._iterations: deque[Iteration] = deque()
        self._epoch = epoch
        self._send = send
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stage-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: MasterMessage) -> None:
        self._jobs.put((message, self.worker.trace.now()))

    def leave(self) -> None:
        self.worker.end()
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            for message, received_s in iter(self._jobs.get, None):
                self._handle(message, received_s)
        except Exception as error:  # noqa: BLE001  the stage's root: reported, never swallowed
            if self.worker.is_over:
                log.debug("epoch %d is over: %s", self._epoch, error)
            else:
                self._tell(StageMessage(failure=_failure(error)))
        finally:
            self.worker.close()

    def _handle(self, message: MasterMessage, received_s: float) -> None:
        if self.worker.is_over:
            return
        kind = message.WhichOneof("kind")
        if kind == "plan":
            self._take_in(message.plan, received_s)
            self._compute()
        elif kind == "setup":
            loaded = self.worker.load(message.setup, self._tell_loading)
            self._tell(StageMessage(loaded=loaded))
        elif kind == "open":
            ready = Ready(last_seq=self.worker.last_input_seq)
            self.worker.open(message.open)
            self._tell(StageMessage(ready=ready))

    def _take_in(self, plan: Plan, received_s: float) -> None:
        if iteration := self.worker.take_in(plan, received_s):
            self._iterations.append(iteration)

    def _look_ahead(self) -> None:
        """Once an iteration at most, so that one is computed while one is awaited."""
        if self._iterations or self._jobs.empty():
            return
        job = self._jobs.get()
        if job is None:
            raise EpochOver
        self._take_in(job[0].plan, job[1])

    def _compute(self) -> None:
        """All that was taken in; meanwhile more may be."""
        while self._iterations:
            if result := self.worker.run(self._iterations.popleft()):
                self._tell(StageMessage(result=result))

    def _tell_loading(self, done_bytes: int, total_bytes: int) -> None:
        progress = LoadProgress(done_bytes=done_bytes, total_bytes=total_bytes)
        self._tell(StageMessage(load_progress=progress))

    def _tell(self, message: StageMessage) -> None:
        message.epoch = self._epoch
        self._send(message)


def serve_stage(bootstrap: StageBootstrap, worker: StageWorker, *, actor_id: str = "") -> bool:
    """Serve until the master says close (True) or hangs up (False)."""
    origin = Origin(stage=bootstrap.stage)
    bound_kernel_caches()
    set_up_logging(bootstrap.log, origin)
    if bootstrap.environment:
        log.info("variables of the driver's: %s", " ".join(sorted(bootstrap.environment)))
    link = ControlLink(bootstrap)
    compute = ComputeThread(worker, link.send)
    compute.start()
    link.send(hello(bootstrap, actor_id=actor_id))
    closed = False
    for message in link.messages():
        kind = message.WhichOneof("kind")
        if kind == "ping":
            link.send(StageMessage(pong=_pong(compute.worker, message.ping)))
        elif kind == "close":
            closed = True
            break
        else:
            if kind == "open":
                compute = _next_epoch(compute, link, message.open.epoch, origin)
            compute.put(message)
    if not closed:
        log.error("the engine master has hung up: leaving")
    link.close()
    return closed


def bound_kernel_caches() -> None:
    """For this process, unless the environment says otherwise; before its first computation."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, MAX_KERNELS)


def _next_epoch(
    compute: ComputeThread, link: ControlLink, epoch: int, origin: Origin
) -> ComputeThread:
    """A thread of its own, and what the last one is stuck in is no longer ours to wait for."""
    compute.leave()
    origin.epoch = epoch
    following = ComputeThread(compute.worker.fresh(), link.send, epoch=epoch)
    following.start()
    return following


def _failure(error: Exception) -> Failure:
    """What a person can mend says all in its message; anything else comes with its traceback."""
    if isinstance(error, OrcaError):
        return Failure(message=str(error))
    return Failure(
        message=f"{type(error).__name__}: {error}",
        traceback=traceback.format_exc(),
        link=isinstance(error, LinkError),
    )


def _pong(worker: StageWorker, ping: Ping) -> Pong:
    progress = worker.trace.progress
    return Pong(
        nonce=ping.nonce,
        last_seq=progress.last_seq,
        phase=progress.phase,
        since_s=worker.trace.now() - progress.since_s,
        trace=worker.trace.drain(),
        num_requests=worker.num_requests,
    )


def main(make_worker: Callable[..., StageWorker] = StageWorker) -> None:
    """The local stage process. Leaves by os._exit: a compute thread may be stuck in a wait."""
    for signum in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # sent to the whole group: the master's to handle
        signal.signal(signum, signal.SIG_IGN)
    bootstrap = StageBootstrap(**json.loads(sys.stdin.readline()))
    closed = serve_stage(bootstrap, make_worker(host=bootstrap.host))
    with contextlib.suppress(OSError):  # whoever read it may be gone
        sys.stderr.flush()
    os._exit(0 if closed else 1)


if __name__ == "__main__":
    main()
