"""The engine master (Orca §4): owns the scheduler and its state, on a thread of its own.

Everything that happens to it comes through one inbox: requests and cancellations
from the front, results and heartbeats from the stages. After each it selects and
sends plans first, and then hands all new tokens to the front at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca_dist.core import FinishReason, NeverFits, Output, Request, Scheduler, TooLate
from orca_dist.engine.pipeline import Pipeline
from orca_dist.engine.recovery import LINK_GRACE_S, recover
from orca_dist.engine.stages import Lost, News
from orca_dist.engine.supervisor import Supervisor
from orca_dist.engine.trace import TraceFlush, TraceLog
from orca_dist.engine.wire import decode_result
from orca_dist.errors import PipelineLost
from orca_dist.proto.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Output]], None]
Lose = Callable[[PipelineLost], None]
Pause = Callable[[bool], None]  # whether the pipeline is being recovered
Event = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How much the engine has to do at a moment."""

    live_requests: int
    waiting_requests: int
    plans_in_flight: int
    used_slots: int
    preempted: int
    entries: int  # in all tables that have one for a request or a plan


class EngineMaster:
    """submit, cancel, finish and attach are thread-safe and return at once; flush_trace waits."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pipeline: Pipeline,
        supervisor: Supervisor,
        trace: TraceLog,
        recovery_timeout_s: float | None,
    ) -> None:
        """`recovery_timeout_s`: None ends with the first lost stage."""
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._supervisor = supervisor
        self._trace = trace
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._outputs: list[Output] = []
        self._deliver: Deliver = lambda outputs: None
        self._lose: Lose = lambda error: None
        self._pause: Pause = lambda paused: None
        self._recovery_timeout_s = recovery_timeout_s
        self._recovery: threading.Thread | None = None  # while one is going on
        self._lost: PipelineLost | None = None
        self._broken_link: tuple[int, str, float] | None = None  # stage, why, when
        self._closing = False
        self._flushes: list[TraceFlush] = []
        self._num_pings = 0
        self._next_ping_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-master", daemon=True)

    # ---- verbs for other threads ---------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._pipeline.listen(lambda news: self._inbox.put(lambda: self._on_news(news)))

    def attach(self, *, deliver: Deliver, lose: Lose, pause: Pause) -> None:
        """The one front that gets outputs; a loss that has happened already is told too."""
        self._inbox.put(lambda: self._on_attach(deliver, lose, pause))

    def submit(self, request: Request) -> None:
        self._inbox.put(lambda: self._on_submit(request))

    def cancel(self, request_id: int) -> None:
        self._inbox.put(lambda: self._on_cancel(request_id))

    def finish(self, request_id: int, num_tokens: int) -> None:
        self._inbox.put(lambda: self._on_finish(request_id, num_tokens))

    def flush_trace(self, timeout_s: float) -> bool:
        """Get the stages' newest trace rows; False where they did not come in time."""
        flush = TraceFlush(self._trace.num_stages)
        self._inbox.put(lambda: self._on_flush(flush))
        return flush.wait(timeout_s)

    def load(self) -> EngineLoad:
        """Counts after everything that was said to the master before this call."""
        answer: queue.SimpleQueue[EngineLoad] = queue.SimpleQueue()
        self._inbox.put(lambda: answer.put(self._count()))
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=1.0)
        return self._count()

    def close(self) -> None:
        """Stop the loop; requests still alive end with PipelineLost."""
        if self._thread.ident is None:  # never started
            return
        self._pipeline.give_up()
        self._inbox.put(self._on_close)
        self._thread.join()
        if self._recovery:
            self._recovery.join()

    # ---- the loop ------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:  # the master's root: a bug here must not hang callers
                log.exception("the engine master failed")
                self._end(PipelineLost(f"the engine master failed: {error}"))

    def _turn(self) -> None:
        """Handle all that has happened, keep the pipeline full, then tell the front."""
        self._wait()
        self._pump()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _wait(self) -> None:
        """The next events, or the time for a heartbeat."""
        try:
            self._inbox.get(timeout=max(0.0, self._wakeup_s() - time.monotonic()))()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
        now = time.monotonic()
        if now >= self._next_ping_s:
            late_s, self._next_ping_s = now - self._next_ping_s, now + self._supervisor.interval_s
            if not self._recovery:
                self._supervisor.excuse(late_s, now)
                self._ping()
                self._watch()

    def _wakeup_s(self) -> float:
        """When to go on though nothing happens: a heartbeat, a deadline, a batch's window."""
        idle = self._lost or self._recovery
        wakeup_s = None if idle else self._scheduler.next_wakeup()
        return self._next_ping_s if wakeup_s is None else min(wakeup_s, self._next_ping_s)

    def _pump(self) -> None:
        """Algorithm 1's inner loop: select and send while plans may be in flight."""
        if self._lost:
            return
        self._outputs += self._scheduler.expire(time.monotonic())
        if self._recovery:
            return
        while plan := self._scheduler.select(time.monotonic()):
            self._trace.sent(plan, self._pipeline.send(plan), time.time())
        if plan := self._scheduler.flush_drops():
            self._pipeline.send(plan)

    # ---- events from the front -----------------------------------------

    def _on_attach(self, deliver: Deliver, lose: Lose, pause: Pause) -> None:
        self._deliver, self._lose, self._pause = deliver, lose, pause
        if self._recovery:
            pause(True)
        if self._lost:
            lose(self._lost)

    def _on_submit(self, request: Request) -> None:
        try:
            self._scheduler.submit(request, time.monotonic())
        except NeverFits as error:
            self._refuse(request, FinishReason.ERROR, error)
        except TooLate as error:
            self._refuse(request, FinishReason.DEADLINE, error)

    def _refuse(self, request: Request, reason: FinishReason, error: Exception) -> None:
        self._outputs.append(Output(request.id, reason=reason, message=f"the request {error}"))

    def _on_cancel(self, request_id: int) -> None:
        self._scheduler.cancel(request_id, time.monotonic())

    def _on_finish(self, request_id: int, num_tokens: int) -> None:
        self._scheduler.finish(request_id, num_tokens, FinishReason.STOP, time.monotonic())

    def _on_flush(self, flush: TraceFlush) -> None:
        if self._lost or self._recovery:
            flush.give_up()
            return
        self._ping()
        flush.expect(self._num_pings)
        self._flushes.append(flush)

    def _on_close(self) -> None:
        self._closing = True
        if not self._lost:
            self._end(PipelineLost("the server is shutting down"))

    def _count(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            live_requests=len(scheduler.pool),
            waiting_requests=scheduler.pool.num_waiting,
            plans_in_flight=scheduler.plans_in_flight,
            used_slots=scheduler.memory.used,
            preempted=scheduler.num_preempted,
            entries=scheduler.num_entries,
        )

    # ---- events from the stages ----------------------------------------

    def _on_news(self, news: News) -> None:
        if isinstance(news, Lost):
            if self._recovery:  # it was lost just before the recovery began to listen
                self._pipeline.pass_back(news)
            else:
                self._on_lost(news.stage, news.why)
            return
        stage, message = news
        kind = message.WhichOneof("kind")
        if kind == "result":
            self._on_result(message.result)
        elif kind == "pong":
            self._on_pong(stage, message.pong)
        elif kind == "failure":
            self._on_failure(stage, message.failure)

    def _on_failure(self, stage: int, failure: pb.Failure) -> None:
        """A broken link is its other end's fault, whose own news may still be on its way."""
        if failure.link:
            self._broken_link = self._broken_link or (stage, failure.message, time.monotonic())
            return
        log.error("%s failed:\n%s", self._pipeline.stages[stage], failure.traceback)
        self._on_lost(stage, failure.message)

    def _on_result(self, result: pb.Result) -> None:
        self._trace.returned(result.seq, time.time())
        self._outputs += self._scheduler.on_result(decode_result(result), time.monotonic())

    def _on_pong(self, stage: int, pong: pb.Pong) -> None:
        self._supervisor.beat(stage, pong.phase, pong.since_s, time.monotonic())
        self._trace.add_rows(stage, pong.trace)
        self._pipeline.stages[stage].num_requests = pong.num_requests
        self._flushes = [flush for flush in self._flushes if not flush.answered(stage, pong.nonce)]

    # ---- watch ---------------------------------------------------------

    def _ping(self) -> None:
        self._num_pings += 1
        if not self._lost:
            self._pipeline.ping(self._num_pings)

    def _watch(self) -> None:
        if self._lost:
            return
        if verdict := self._supervisor.verdict(time.monotonic()):
            self._on_lost(*verdict)
        elif self._broken_link and time.monotonic() - self._broken_link[2] > LINK_GRACE_S:
            self._on_link_lost(*self._broken_link[:2])

    def _on_lost(self, stage: int, why: str) -> None:
        """A stage is lost: begin a new epoch without it, or end."""
        if self._lost or self._recovery:
            return
        status = self._pipeline.stages[stage]
        status.state = "lost"
        log.error("%s is lost: %s", status, why)
        self._recover([stage], f"{status} is lost: {why}")

    def _on_link_lost(self, stage: int, why: str) -> None:
        """Both of its ends are alive: they are connected anew."""
        status = self._pipeline.stages[stage]
        log.error("%s lost its link: %s", status, why)
        self._recover([], f"{status} lost its link: {why}")

    def _recover(self, lost: list[int], what: str) -> None:
        """Requests stay where they are, on a thread of its own the pipeline is opened again."""
        if self._recovery_timeout_s is None or self._closing:
            self._end(PipelineLost(what))
            return
        self._give_up_flushes()
        self._pipeline.hold()
        self._recovery = threading.Thread(
            target=self._run_recovery,
            args=(lost, self._recovery_timeout_s, time.monotonic()),
            name="recovery",
            daemon=True,
        )
        self._pause(True)
        self._recovery.start()

    def _run_recovery(self, lost: list[int], timeout_s: float, since_s: float) -> None:
        try:
            replaced = recover(self._pipeline, self._supervisor, lost, timeout_s)
        except PipelineLost as error:
            self._inbox.put(functools.partial(self._on_unrecovered, error))
        except Exception as error:  # the thread's root: a bug here must not hang callers
            log.exception("the recovery failed")
            failure = PipelineLost(f"the recovery failed: {error}")
            self._inbox.put(functools.partial(self._on_unrecovered, failure))
        else:
            self._inbox.put(lambda: self._on_recovered(replaced, time.monotonic() - since_s))

    def _on_recovered(self, replaced: set[int], took_s: float) -> None:
        """Every live request starts over from its known tokens."""
        if self._lost:
            return
        now = time.monotonic()
        fatal = {self._fatal_seq(stage) for stage in replaced}
        self._outputs += self._scheduler.restart(now, fatal)
        self._supervisor.reset(now)
        self._broken_link = self._recovery = None
        self._pipeline.listen(lambda news: self._inbox.put(lambda: self._on_news(news)))
        log.warning(
            "recovered in %.1f s: epoch %d, stages %s are new, %d requests go on",
            took_s,
            self._pipeline.epoch,
            sorted(replaced) or "none",
            len(self._scheduler.pool),
        )
        self._pause(False)

    def _on_unrecovered(self, error: PipelineLost) -> None:
        self._recovery = None
        if not self._lost:
            log.error("%s", error)
            self._end(error)

    def _fatal_seq(self, stage: int) -> int:
        """The plan that a lost stage was computing: the first that its successor had no input of.

        The last stage's are those that have not returned; -1: it computed none.
        """
        received = -1
        if stage + 1 < len(self._pipeline.stages):
            received = self._pipeline.last_input_seq(stage + 1)
        seqs = self._scheduler.seqs_in_flight
        return next((seq for seq in seqs if seq > received), -1)

    def _give_up_flushes(self) -> None:
        for flush in self._flushes:
            flush.give_up()
        self._flushes.clear()

    def _end(self, error: PipelineLost) -> None:
        """Every live request ends with `error`; tokens that arrived before it go first."""
        self._lost = error
        self._give_up_flushes()
        outputs, self._outputs = self._outputs, []
        self._deliver(outputs)
        self._lose(error)
