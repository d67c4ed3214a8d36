"""A workload through a virtual pipeline: who sends when, and what becomes of each request.

Owns the clients' side: it submits requests as they come due and writes their
times down in columns. Costs about 3 microseconds for each request and iteration
that it is part of, most of them the scheduler's own.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orca_dist.config import ScheduleConfig
from orca_dist.core import Output, Plan, PlanResult, Request
from orca_dist.errors import ConfigError
from orca_dist.scheduling import inflight, make_scheduler
from orca_dist.sim.pipeline import (
    NO_LATENCY,
    TOKEN,
    ControlLatency,
    Cost,
    PlanRun,
    VirtualPipeline,
    zeros,
)
from orca_dist.sim.workload import Workload, WorkloadRequest, prompt_len

STOP = [1]  # the answer that ends a request which reserved more than it uses
STOPS = frozenset(STOP)
PROGRESS_EVERY = 1000
MAX_DEFAULT_BLOCKS = 4_000_000

OnProgress = Callable[[int, int], None]  # requests done, and in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. `schedule.kv_tokens` None: room for all that may run at once.

    `reserve_len`: each request asks for so many slots in all, though its answer ends before.
    `whole_batches`: answers reach their clients whole, and when the last one of their batch
    has ended. `keep_runs`: of so many first plans the way is remembered, for a picture.
    """

    schedule: ScheduleConfig
    cost: Cost
    latency: ControlLatency = NO_LATENCY
    reserve_len: int | None = None
    whole_batches: bool = False
    keep_runs: int = 0


@dataclass(slots=True, kw_only=True)
class Record:
    """What happened. Requests by their place in the workload, stages by index; nan: not yet.

    `num_entries` counts a request once for each plan that it was in. `largest_plan`: most
    requests in one; `most_admitted`: most of them at once in the pipeline's memory;
    `fewest_before_queue`: fewest that were in it while others waited, None where none did.
    """

    outs: Sequence[int]
    arrived_s: array[float]
    first_token_s: array[float]
    ended_s: array[float]
    busy_s: list[float]
    max_plan_size: int
    num_plans: int = 0
    num_decode_plans: int = 0
    num_entries: int = 0
    num_preempted: int = 0
    largest_plan: int = 0
    most_admitted: int = 0
    fewest_before_queue: int | None = None
    runs: list[PlanRun] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last answer's end."""
        return max(self.ended_s) - min(self.arrived_s)


def simulate(setup: Setup, workload: Workload, on_progress: OnProgress | None = None) -> Record:
    """Runs until every request has its answer.

    Raises ConfigError for a request that can't be simulated: it would never fit, or its
    prompt's length is not known.
    """
    return _Simulation(setup, workload, on_progress).run()


class _Simulation:
    """The observer of its pipeline."""

    def __init__(self, setup: Setup, workload: Workload, on_progress: OnProgress | None) -> None:
        num = len(workload.requests)
        self._setup = setup
        self._requests = workload.requests
        self._max_out = workload.clients or num
        self._on_progress = on_progress
        self._next = 0
        self._num_out = 0
        self._due = False  # the next arrival is among the pipeline's events
        self._num_ended = 0
        self._held: list[int] = []
        self._stop_at: dict[int, int] = {}
        self._scheduler = make_scheduler(
            setup.schedule, num_blocks=_num_blocks(setup, self._requests)
        )
        self._pipeline = VirtualPipeline(
            self._scheduler,
            setup.cost,
            self,
            latency=setup.latency,
            answer=zeros if setup.reserve_len is None else self._answer,
        )
        self.record = Record(
            outs=[request.out for request in self._requests],
            arrived_s=array("d", [math.nan]) * num,
            first_token_s=array("d", [math.nan]) * num,
            ended_s=array("d", [math.nan]) * num,
            busy_s=[0.0] * setup.cost.num_stages,
            max_plan_size=_max_plan_size(setup.schedule),
        )

    def run(self) -> Record:
        self._feed()
        self._pipeline.run()
        assert self._num_ended == len(self._requests), "the schedule came to a halt"
        self.record.num_preempted = self._scheduler.num_preempted
        return self.record

    # ---- the clients ---------------------------------------------------

    def _feed(self) -> None:
        if self._due or self._next == len(self._requests) or self._num_out >= self._max_out:
            return
        self._due = True
        at_s = max(self._requests[self._next].at_s, self._pipeline.now_s)
        self._pipeline.at(at_s, self._arrive)

    def _arrive(self) -> None:
        index, now_s = self._next, self._pipeline.now_s
        self._scheduler.submit(self._request(index), now_s)
        self.record.arrived_s[index] = now_s
        self._due = False
        self._next += 1
        self._num_out += 1
        self._feed()

    def _request(self, index: int) -> Request:
        """Where only a length is known, the prompt begins like no other."""
        source = self._requests[index]
        prompt = source.prompt
        if isinstance(prompt, int):
            prompt = (-1 - index, *TOKEN * (prompt - 1))
        assert isinstance(prompt, tuple)
        if self._setup.reserve_len is None:
            return Request(id=index, prompt=prompt, max_tokens=source.out)
        self._stop_at[index] = len(prompt) + source.out - 1  # the last token's own is not computed
        left = max(source.out, self._setup.reserve_len - len(prompt))
        return Request(id=index, prompt=prompt, max_tokens=left, stop_ids=STOPS)

    def _answer(self, plan: Plan) -> PlanResult:
        """Answers that stop where the workload says, not where their reservation does."""
        result, stop_at = zeros(plan), self._stop_at
        ends = {id for id, start, length in _columns(plan) if start + length == stop_at[id]}
        result.tokens[:] = [STOP if id in ends else TOKEN for id in result.ids]
        return result

    # ---- the observer --------------------------------------------------

    def sent(self, run: PlanRun) -> None:
        record = self.record
        record.num_plans += 1
        record.num_decode_plans += any(run.plan.samples)
        record.num_entries += len(run.plan.ids)
        record.largest_plan = max(record.largest_plan, len(run.plan.ids))
        pool = self._scheduler.pool
        self._note_admitted(pool.num_admitted, pool.num_waiting)
        for stage, start_s in enumerate(run.starts_s):
            record.busy_s[stage] += run.ends_s[stage] - start_s
        if len(record.runs) < self._setup.keep_runs:
            record.runs.append(run)

    def _note_admitted(self, admitted: int, waiting: int) -> None:
        record = self.record
        record.most_admitted = max(record.most_admitted, admitted)
        if waiting:
            fewest = record.fewest_before_queue
            record.fewest_before_queue = admitted if fewest is None else min(fewest, admitted)

    def flushed(self, plan: Plan) -> None:
        pass

    def returned(self, outputs: Sequence[Output]) -> None:
        first_s, now_s = self.record.first_token_s, self._pipeline.now_s
        for output in outputs:
            if output.reason is not None:
                self._held.append(output.id)
            if first_s[output.id] != first_s[output.id]:  # nan
                first_s[output.id] = now_s
        if self._held and not (self._setup.whole_batches and self._scheduler.pool.num_admitted):
            self._release()

    def _release(self) -> None:
        """The answers that have ended reach their clients, who may send again."""
        now_s = self._pipeline.now_s
        for index in self._held:
            self.record.ended_s[index] = now_s
            if self._setup.whole_batches:
                self.record.first_token_s[index] = now_s
        before = self._num_ended // PROGRESS_EVERY
        self._num_ended += len(self._held)
        self._num_out -= len(self._held)
        self._held.clear()
        self._feed()
        if self._on_progress and self._num_ended // PROGRESS_EVERY > before:
            self._on_progress(self._num_ended, len(self._requests))


def _columns(plan: Plan) -> zip[tuple[int, int, int]]:
    return zip(plan.ids, plan.starts, plan.lengths, strict=True)


def _max_plan_size(schedule: ScheduleConfig) -> int:
    return min(schedule.micro_batch_size or schedule.max_batch_size, schedule.max_batch_size)


def _num_blocks(setup: Setup, requests: Sequence[WorkloadRequest]) -> int:
    """Of KV memory; raises ConfigError for requests that don't fit even alone."""
    size, longest = setup.schedule.block_size, 0
    for request in requests:
        longest = max(longest, _num_slots(setup, request))
    num_blocks = -(-longest // size)
    if setup.schedule.kv_tokens is None:
        running = inflight(setup.schedule) * setup.schedule.max_batch_size
        return max(num_blocks, min(num_blocks * running * 2, MAX_DEFAULT_BLOCKS))
    available = setup.schedule.kv_tokens // size
    if num_blocks > available:
        raise ConfigError(
            f"kv_tokens = {setup.schedule.kv_tokens}: {available * size} slots in whole blocks, "
            f"the longest request needs {longest}; raise --kv-tokens, or shorten it"
        )
    return available


def _num_slots(setup: Setup, request: WorkloadRequest) -> int:
    length = prompt_len(request.prompt)
    if length is None:
        raise ConfigError(
            f"request {request.id}: its prompt is a text, and a simulation has no tokenizer; "
            "give a length or a list of token ids"
        )
    return max(length + request.out, setup.reserve_len or 0)
