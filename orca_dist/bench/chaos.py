"""Faults on a live pipeline under load: what they cost, and whether any answer suffers.

First every prompt is answered without a fault. Then requests for the same prompts, greedy and
seeded ones, keep coming while stage after stage comes to harm, and each answer has to be the
same, token by token. Times are of what the engine master itself says: when it gave the epoch
up (health is NOT_SERVING from then on), when the next began, when that brought its first token.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orca_dist.bench.faults import Fault, Round, Second
from orca_dist.bench.jobs import Job, make_jobs, ordinary_ids
from orca_dist.bench.ledger import Answer, Ledger, Verdict
from orca_dist.bench.offline import check_jobs
from orca_dist.config import EngineConfig, Launcher, LogConfig
from orca_dist.core import Output, Request, Sampling
from orca_dist.engine.engine import Engine, EngineInfo
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.engine.master import Deliver, EngineLoad, Lose, Pause
from orca_dist.errors import PipelineLost, RequestFailed
from orca_dist.sim.workload import Workload

FAULTY_STAGE = "orca_dist.stage.faulty"

log = logging.getLogger(__name__)
News = Sequence[Output] | PipelineLost | bool  # True: a recovery begins; False: it is over


class ChaosEngine(Protocol):
    """What is done to an engine here."""

    def attach(self, *, deliver: Deliver, lose: Lose, pause: Pause) -> None: ...
    def submit(self, request: Request) -> None: ...
    def info(self) -> EngineInfo: ...
    def load(self) -> EngineLoad: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Random arrivals, `rate` a second, while fewer than `clients` requests are out.

    `rate` None: as many as were answered in the run without faults.
    """

    clients: int
    rate: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a fault may stay unnoticed, and a recovery take."""

    notice_s: float
    recovery_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Seconds from a fault to the end of its epoch, to the start of the next, and to the first
    token that this one brought."""

    fault: Fault
    stage: int
    detection_s: float
    recovery_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosResult:
    """`recoveries` are more than rounds where a fault needed several, or none was asked for."""

    requests: int
    lost: int
    duplicated: int
    differing: int
    recoveries: int
    leaked_slots: int
    rounds: tuple[RoundTimes, ...]

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.differing or self.leaked_slots)


def live_chaos(
    model: Path,
    config: EngineConfig,
    workload: Workload,
    rounds: Sequence[Round],
    load: Load,
    limits: Limits,
    log_config: LogConfig,
    on_progress: Callable[[int, int], None],
) -> ChaosResult:
    """As run_chaos, on stages of its own; raises what Engine.start raises, too."""
    placement = LocalPlacement(FAULTY_STAGE) if config.launcher is Launcher.LOCAL else None
    engine = Engine.start(model, config, log_config=log_config, placement=placement)
    try:
        jobs = make_jobs(workload, seed=load.seed, ids=ordinary_ids(engine.spec.vocab_size))
        check_jobs(engine, jobs)
        return run_chaos(engine, jobs, rounds, load, limits, on_progress)
    finally:
        engine.close()


def run_chaos(
    engine: ChaosEngine,
    jobs: Sequence[Job],
    rounds: Sequence[Round],
    load: Load,
    limits: Limits,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ChaosResult:
    """`on_progress` hears how many of how many rounds are over.

    A pipeline that is lost for good ends the run, its requests with it. Raises RequestFailed where
    one can't be served even without a fault, or a fault is never noticed.
    """
    front = _Front(engine)
    expected, took_s = _without_faults(front, jobs)
    arrivals = _Arrivals(front, jobs, expected, load, load.rate or len(jobs) / took_s)
    times: list[RoundTimes] = []
    try:
        for done, each in enumerate(rounds):
            on_progress(done, len(rounds))
            times.append(_round(front, each, limits))
        on_progress(len(rounds), len(rounds))
        arrivals.stop()
        front.wait(lambda: not front.ledger.live, limits.recovery_s)
    except PipelineLost as error:
        log.error("%s", error)
        front.ledger.give_up(str(error))
    front.ledger.give_up("it never ended")
    return _result(front, times)


class _Front:
    """Takes what the master says, with the times at which it did, and keeps arrivals going."""

    def __init__(self, engine: ChaosEngine) -> None:
        self.engine = engine
        self.ledger = Ledger()
        self.ids = itertools.count(1)
        self.is_paused = False
        self.ended_s: list[float] = []  # of epochs
        self.begun_s = self.token_s = 0.0  # of the newest epoch, of the newest token
        self.tick: Callable[[], float] = lambda: 1.0  # does what is due; seconds to the next
        self._to_wake = 0  # a stopped process
        self._news: queue.SimpleQueue[tuple[float, News]] = queue.SimpleQueue()
        engine.attach(deliver=self._tell, lose=self._tell, pause=self._on_pause)

    def inflict(self, each: Round) -> float:
        """Returns when."""
        pid = self.engine.info().stages[each.stage].pid
        self._to_wake = pid if each.fault is Fault.STOP else 0
        now_s = time.monotonic()
        each.inflict(pid)
        return now_s

    def kill_meanwhile(self, second: Second) -> None:
        """Once more, unless the recovery is over by then."""
        self.wait(lambda: not self.is_paused, second.after_s)
        if self.is_paused:
            _signal(self.engine.info().stages[second.stage].pid, signal.SIGKILL)

    def wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether `condition` came true in time; raises PipelineLost."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._take(min(left_s, self.tick()))
        return True

    def answers_again(self) -> bool:
        """The newest epoch has brought a token."""
        return not self.is_paused and self.token_s > self.begun_s

    def submit(self, job: Job, sampling: Sampling, expected: Answer | None = None) -> Answer:
        id = next(self.ids)
        answer = self.ledger.sent(id, expected)
        self.engine.submit(Request(id=id, prompt=job.prompt, max_tokens=job.out, sampling=sampling))
        return answer

    def _tell(self, news: News) -> None:
        """On the master's thread."""
        self._news.put((time.monotonic(), news))

    def _on_pause(self, paused: bool) -> None:
        """On the master's thread. The stopped stage wakes before it is killed: what it still has
        to say comes too late, and must not count."""
        self._tell(paused)
        if paused and self._to_wake:
            _signal(self._to_wake, signal.SIGCONT)
            self._to_wake = 0

    def _take(self, timeout_s: float) -> None:
        try:
            at_s, news = self._news.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return
        if isinstance(news, PipelineLost):
            raise news
        if isinstance(news, bool):
            self._turn(at_s, paused=news)
            return
        if any(output.tokens for output in news):
            self.token_s = at_s
        self.ledger.note(news)

    def _turn(self, at_s: float, *, paused: bool) -> None:
        self.is_paused = paused
        if paused:
            self.ended_s.append(at_s)
        else:
            self.begun_s = at_s


class _Arrivals:
    """Requests that come at random, each for one of the jobs."""

    def __init__(
        self,
        front: _Front,
        jobs: Sequence[Job],
        expected: Sequence[Answer],
        load: Load,
        rate: float,
    ) -> None:
        self._front = front
        self._jobs = jobs
        self._expected = expected
        self._clients = load.clients
        self._rate = rate
        self._rng = random.Random(f"{load.seed} arrivals")
        self._due_s = time.monotonic()
        front.tick = self._tick

    def stop(self) -> None:
        self._front.tick = lambda: 1.0

    def _tick(self) -> float:
        """While all clients are out, the next request goes as soon as one has its answer."""
        if len(self._front.ledger.live) >= self._clients:
            return 1.0
        left_s = self._due_s - time.monotonic()
        if left_s > 0:
            return left_s
        index = self._rng.randrange(len(self._jobs))
        self._front.submit(self._jobs[index], sampling_of(index), self._expected[index])
        self._due_s = time.monotonic() + self._rng.expovariate(self._rate)
        return 0.0


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has been replaced
        os.kill(pid, signum)


def sampling_of(index: int) -> Sampling:
    """Greedy and seeded ones take turns."""
    return Sampling(temperature=1.0, seed=index) if index % 2 else Sampling()


def _without_faults(front: _Front, jobs: Sequence[Job]) -> tuple[list[Answer], float]:
    """What each job's answer is, and how long all took together."""
    began_s = time.monotonic()
    answers = [front.submit(job, sampling_of(index)) for index, job in enumerate(jobs)]
    front.wait(lambda: not front.ledger.live, float("inf"))
    for answer in answers:
        if answer.message:
            raise RequestFailed(answer.message)
    front.ledger = Ledger()
    return answers, time.monotonic() - began_s


def _round(front: _Front, each: Round, limits: Limits) -> RoundTimes:
    front.wait(lambda: False, each.delay_s)
    front.wait(lambda: not front.is_paused, limits.recovery_s)
    num_ended = len(front.ended_s)
    fault_s = front.inflict(each)
    what = f"stage {each.stage} met {each.fault}, and"
    if not front.wait(lambda: len(front.ended_s) > num_ended, limits.notice_s):
        raise RequestFailed(f"{what} nothing was noticed for {limits.notice_s:.0f} s")
    if each.second:
        front.kill_meanwhile(each.second)
    if not front.wait(front.answers_again, limits.recovery_s):
        raise RequestFailed(f"{what} no token came for {limits.recovery_s:.0f} s")
    return RoundTimes(
        fault=each.fault,
        stage=each.stage,
        detection_s=front.ended_s[num_ended] - fault_s,
        recovery_s=front.begun_s - fault_s,
        first_token_s=front.token_s - fault_s,
    )


def _result(front: _Front, times: Sequence[RoundTimes]) -> ChaosResult:
    ledger = front.ledger
    return ChaosResult(
        requests=ledger.num_ended,
        lost=ledger.count(Verdict.LOST),
        duplicated=ledger.count(Verdict.DUPLICATED),
        differing=ledger.count(Verdict.DIFFERING),
        recoveries=len(front.ended_s),
        leaked_slots=front.engine.load().used_slots,
        rounds=tuple(times),
    )
