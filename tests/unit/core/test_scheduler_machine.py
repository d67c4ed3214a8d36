"""Hypothesis drives the Scheduler with any order of events and looks for a broken promise.

Owns a model of the requests (tokens, progress, who is in flight) that is told the
same events and shares no code with core; memory is watched by TrackedMemory and
plans are replayed by a stage's table. What may be in a plan is stated as four
properties: oldest first without a gap, within the caps, as large as the caps
allow, and none while nothing runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from orca_dist.core import (
    FinishReason,
    Forming,
    NeverFits,
    Output,
    Phase,
    Plan,
    PlanResult,
    Request,
    Sampling,
    Scheduler,
    SchedulerConfig,
)
from tests.fixtures.stage_replay import StageReplay
from tests.fixtures.tracked_memory import tracked_reserve

VOCAB = 4
PLAIN = 3  # never a stop id here: what a drain samples
TOKENS = st.integers(0, VOCAB - 1)
TOKEN_LISTS = st.lists(TOKENS, min_size=1, max_size=3)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12)
ARRIVALS = st.tuples(PROMPTS, st.integers(1, 8), st.frozensets(st.integers(0, 1)))
PICKS = st.one_of(st.integers(0, 5), st.integers(0, 999))


class Fate(StrEnum):
    """What happens to one entry of a plan on the last stage."""

    ONE_TOKEN = "one token"
    TOKENS = "tokens"
    FAILED = "failed"
    FAILED_WITH_TOKENS = "failed with tokens"


FATES = [Fate.ONE_TOKEN] * 5 + [Fate.TOKENS] * 4 + [Fate.FAILED, Fate.FAILED_WITH_TOKENS]


@dataclass(slots=True)
class Live:
    """The model's view of one live request."""

    request: Request
    tokens: list[int]
    scheduled_len: int = 0
    in_flight: bool = False
    num_iterations: int = 0  # this epoch

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def unscheduled_len(self) -> int:
        return len(self.tokens) - self.scheduled_len

    @property
    def prefill_len(self) -> int:
        return 0 if self.scheduled_len else len(self.tokens)


@dataclass(slots=True)
class Expected:
    """What on_result owes the outside for one request."""

    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    message: str = ""


@dataclass(slots=True)
class Answers:
    """What the last stage will say: tokens per entry, and who fails in which way."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@st.composite
def answers_to(draw: st.DrawFn, plan: Plan) -> Answers:
    """Mostly a token each; sometimes more, a stop id, or a request that fails alone."""
    answers = Answers()
    for request_id in plan.ids:
        fate = draw(st.sampled_from(FATES))
        if fate is Fate.ONE_TOKEN:
            answers.tokens[request_id] = [PLAIN]
        elif fate is not Fate.FAILED:
            answers.tokens[request_id] = draw(TOKEN_LISTS)
        if fate in (Fate.FAILED, Fate.FAILED_WITH_TOKENS):
            answers.failed[request_id] = f"request {request_id} went wrong"
    return answers


def answer_plainly(plan: Plan) -> Answers:
    return Answers(tokens={request_id: [PLAIN] for request_id in plan.ids})


def result_of(plan: Plan, answers: Answers) -> PlanResult:
    return PlanResult(
        seq=plan.seq,
        ids=list(answers.tokens),
        tokens=list(answers.tokens.values()),
        failed=answers.failed,
    )


def accepted(live: Live, tokens: list[int]) -> Expected:
    """Tokens up to and with the first that ends the answer."""
    room = live.request.max_tokens - (len(live.tokens) - len(live.request.prompt))
    kept = tokens[:room]
    for i, token in enumerate(kept):
        if token in live.request.stop_ids:
            return Expected(tuple(kept[: i + 1]), FinishReason.STOP)
    return Expected(tuple(kept), FinishReason.LENGTH if len(kept) == room else None)


class SchedulerMachine(RuleBasedStateMachine):
    """Every event in any order, with any bounds."""

    @initialize(
        forming=st.sampled_from(Forming),
        inflight=st.sampled_from([1, 2, 2, 3, 4]),
        max_batch_size=st.sampled_from([1, 2, 3, 4, 8]),
        max_batch_tokens=st.sampled_from([1, 5, 9, 12, 16, 24, 48]),
        min_chunk=st.sampled_from([1, 2, 5, 8, 16]),
        num_blocks=st.sampled_from([1, 5, 12, 20, 30, 48, 80, 120]),
        block_size=st.sampled_from([1, 1, 2, 3]),
    )
    def start(
        self,
        forming: Forming,
        inflight: int,
        max_batch_size: int,
        max_batch_tokens: int,
        min_chunk: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.config = SchedulerConfig(
            inflight=inflight,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            forming=forming,
            min_chunk=min_chunk,
        )
        self.memory = tracked_reserve(num_blocks=num_blocks, block_size=block_size)
        self.scheduler = Scheduler(config=self.config, memory=self.memory)
        self.stage = StageReplay(block_size=block_size)
        self.live: dict[int, Live] = {}  # in arrival order
        self.flight: list[Plan] = []
        self.returned: list[PlanResult] = []
        self.num_submitted = 0

    # ---- the model's views ----------------------------------------------

    @property
    def admitted(self) -> list[Live]:
        return [live for live in self.live.values() if live.id in self.memory.held]

    @property
    def waiting(self) -> list[Live]:
        return [live for live in self.live.values() if live.id not in self.memory.held]

    @property
    def runnable(self) -> list[Live]:
        return [live for live in self.admitted if live.unscheduled_len]

    def any_id(self, pick: int) -> int:
        """Mostly the id of a live request; else of an ended one, or of none yet."""
        ids = list(self.live)
        return ids[pick] if pick < len(ids) else pick % (self.num_submitted + 1)

    # ---- events -----------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
    def submit(self, arrivals: list[tuple[list[int], int, frozenset[int]]]) -> None:
        for prompt, max_tokens, stop_ids in arrivals:
            self._submit(prompt, max_tokens, stop_ids)

    @precondition(lambda self: self.live)
    @rule(times=st.integers(1, 4))
    def select(self, times: int) -> None:
        for _ in range(times):
            self._select()

    @precondition(lambda self: self.flight)
    @rule(data=st.data(), times=st.integers(1, 4))
    def return_oldest(self, data: st.DataObject, times: int) -> None:
        for plan in self.flight[:times]:
            self._return(data.draw(answers_to(plan)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), times=st.integers(1, 6))
    def turn_around(self, data: st.DataObject, times: int) -> None:
        """What the engine master does: fill the pipeline, take a result, fill it again."""
        for _ in range(times):
            while self._select():
                pass
            if self.flight:
                self._return(data.draw(answers_to(self.flight[0])))

    @precondition(lambda self: self.num_submitted)
    @rule(pick=PICKS, event=st.sampled_from(["cancel", "finish", "late result"]), num=PICKS)
    def hear_of_one(self, pick: int, event: str, num: int) -> None:
        if event == "cancel":
            self._cancel(self.any_id(pick))
        elif event == "finish":
            self._finish(self.any_id(pick), num_tokens=num % 5)
        elif self.returned:
            self._return_late(self.returned[pick % len(self.returned)])

    @precondition(lambda self: self.stage.known)
    @rule(lost=st.sampled_from([True, False, False, False]))
    def idle_or_lose_the_pipeline(self, lost: bool) -> None:
        if lost:
            self._restart()
        else:
            self._flush_drops()

    # ---- promises ---------------------------------------------------------

    @invariant()
    def memory_adds_up(self) -> None:
        self.memory.check()
        assert set(self.memory.held) <= set(self.live), "an ended request holds memory"

    @invariant()
    def counts_equal_a_recount(self) -> None:
        scheduler, admitted = self.scheduler, self.admitted
        assert scheduler.plans_in_flight == len(self.flight) <= self.config.inflight
        assert len(scheduler.pool) == len(self.live)
        assert scheduler.pool.num_admitted == len(admitted)
        assert scheduler.pool.num_waiting == len(self.live) - len(admitted)
        assert scheduler._prefill_tokens == sum(live.prefill_len for live in admitted)

    @invariant()
    def pool_agrees_with_the_model(self) -> None:
        for live in self.live.values():
            entry = self.scheduler.pool.get(live.id)
            assert entry is not None
            assert entry.tokens == live.tokens
            assert entry.scheduled_len == live.scheduled_len
            assert entry.phase is self._phase(live)
            assert live.in_flight or entry.computed_len == entry.scheduled_len
            assert entry.computed_len <= entry.scheduled_len <= entry.known_len

    @invariant()
    def who_came_first_ran_at_least_as_often(self) -> None:
        """The paper's property of iteration-level first come, first served (§4.2)."""
        iterations = [live.num_iterations for live in self.live.values()]
        assert iterations == sorted(iterations, reverse=True)

    @invariant()
    def admission_is_in_order(self) -> None:
        live = list(self.live.values())
        assert live[: len(self.admitted)] == self.admitted

    @invariant()
    def stages_know_what_was_scheduled(self) -> None:
        for live in self.live.values():
            known = self.stage.known.get(live.id)
            assert (known is not None) == (live.scheduled_len > 0)
            if known:
                assert known.computed_len == live.scheduled_len
                assert known.tokens == live.tokens[: live.scheduled_len]
                assert set(known.blocks) == self.memory.held[live.id]

    def teardown(self) -> None:
        """Whatever happened, all live requests end and nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        self._drain()
        self._flush_drops()
        assert self.scheduler.flush_drops() is None
        assert not self.stage.known
        self._check_empty()
        self._run_one_of_full_size()
        self._check_empty()

    # ---- helpers ----------------------------------------------------------

    @staticmethod
    def _phase(live: Live) -> Phase:
        if not live.scheduled_len:
            return Phase.INITIATION
        return Phase.INCREMENT if live.unscheduled_len else Phase.RUNNING

    def _submit(self, prompt: list[int], max_tokens: int, stop_ids: frozenset[int]) -> None:
        request = Request(
            id=self.num_submitted,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            sampling=Sampling(seed=self.num_submitted),
        )
        self.num_submitted += 1
        if len(prompt) + max_tokens > self.memory.capacity:
            with pytest.raises(NeverFits) as refusal:
                self.scheduler.submit(request, 0.0)
            assert refusal.value.needed == len(prompt) + max_tokens
            return
        self.scheduler.submit(request, 0.0)
        self.live[request.id] = Live(request, list(prompt))

    def _select(self) -> Plan | None:
        room = len(self.flight) < self.config.inflight
        num_admitted = len(self.admitted)
        plan = self.scheduler.select(0.0)
        if not room:
            assert plan is None
            assert len(self.admitted) == num_admitted
            return None
        self._check_admission()
        if plan is None:
            assert not self.runnable, "nothing selected, though something could run"
            return None
        self._check_batch(plan)
        self._take(plan)
        return plan

    def _cancel(self, request_id: int) -> None:
        was_live = self.live.pop(request_id, None) is not None
        assert self.scheduler.cancel(request_id, 0.0) == was_live
        assert self.scheduler.cancel(request_id, 0.0) is False
        assert request_id not in self.memory.held

    def _finish(self, request_id: int, num_tokens: int) -> None:
        """A stop string was met after `num_tokens`; so many must have been sampled."""
        live = self.live.get(request_id)
        output = self.scheduler.finish(request_id, num_tokens, FinishReason.STOP, 0.0)
        if live is None or len(live.tokens) - len(live.request.prompt) < num_tokens:
            assert output is None
            return
        assert output == Output(id=request_id, reason=FinishReason.STOP)
        assert request_id not in self.memory.held
        del self.live[request_id]

    def _return_late(self, result: PlanResult) -> None:
        """Of an earlier epoch, or for the second time: nothing happens."""
        assert self.scheduler.on_result(result, 0.0) == []

    def _restart(self) -> None:
        self.scheduler.restart(0.0)
        self.returned += [result_of(plan, answer_plainly(plan)) for plan in self.flight]
        self.flight.clear()
        self.stage.reset()
        assert self.memory.used == 0
        for live in self.live.values():
            live.scheduled_len = live.num_iterations = 0
            live.in_flight = False

    def _flush_drops(self) -> None:
        """The stages hear of drops by the next plan, or at once where none is on its way."""
        scheduled = {live.id for live in self.live.values() if live.scheduled_len}
        untold = set(self.stage.known) - scheduled
        plan = self.scheduler.flush_drops()
        if self.flight or not untold:
            assert plan is None
            return
        assert plan is not None, "the stages were not told"
        assert sorted(plan.drops) == sorted(untold)
        assert not plan.ids
        assert not plan.admits
        self.stage.apply(plan)
        assert set(self.stage.known) == scheduled

    def _check_admission(self) -> None:
        """All were admitted that could be."""
        limit = self.config.inflight * self.config.max_batch_size
        assert len(self.admitted) <= limit
        if self.waiting and len(self.admitted) < limit:
            needed = self.memory.num_needed(self.waiting[0].request.max_len)
            assert needed > self.memory.num_free, "the head of the line waits beside free memory"

    def _max_requests(self) -> int:
        share = -(-len(self.admitted) // self.config.inflight)
        whole = self.config.max_batch_size
        return whole if self.config.forming is Forming.PAPER else min(whole, share)

    def _max_prefill(self) -> int:
        """Prompt tokens of one batch, so long as its first request is not the only one."""
        total = sum(live.prefill_len for live in self.admitted)
        share = max(self.config.min_chunk, -(-total // self.config.inflight))
        whole = self.config.max_batch_tokens
        return whole if self.config.forming is Forming.PAPER else min(whole, share)

    def _fits(self, batch: list[Live]) -> bool:
        num_tokens = sum(live.unscheduled_len for live in batch)
        num_prefill = sum(live.prefill_len for live in batch)
        return len(batch) <= self._max_requests() and (
            len(batch) == 1
            or (num_tokens <= self.config.max_batch_tokens and num_prefill <= self._max_prefill())
        )

    def _check_batch(self, plan: Plan) -> None:
        runnable = self.runnable
        batch, left_out = runnable[: len(plan.ids)], runnable[len(plan.ids) :]
        assert batch
        assert plan.ids == [live.id for live in batch], "not the oldest runnable ones, in order"
        assert not any(live.in_flight for live in batch)
        assert plan.starts == [live.scheduled_len for live in batch]
        assert plan.lengths == [live.unscheduled_len for live in batch]
        assert plan.num_tokens == sum(plan.lengths)
        assert self._fits(batch), "larger than the caps"
        assert not left_out or not self._fits([*batch, left_out[0]]), "smaller than it could be"

    def _take(self, plan: Plan) -> None:
        """The plan is on its way: the stages hear it, the model notes it."""
        self.flight.append(plan)
        self.stage.apply(plan)
        for admit in plan.admits:
            assert admit.sampling is self.live[admit.id].request.sampling
        for request_id in plan.ids:
            live = self.live[request_id]
            assert self.stage.known[request_id].tokens == live.tokens
            live.scheduled_len = len(live.tokens)
            live.in_flight = True
            live.num_iterations += 1

    def _return(self, answers: Answers) -> None:
        plan = self.flight.pop(0)
        result = result_of(plan, answers)
        self.returned.append(result)
        expected = self._expect(plan, answers)
        outputs = self.scheduler.on_result(result, 0.0)
        assert len({output.id for output in outputs}) == len(outputs)
        assert {
            output.id: Expected(output.tokens, output.reason, output.message) for output in outputs
        } == expected

    def _expect(self, plan: Plan, answers: Answers) -> dict[int, Expected]:
        """What the outside is to hear, and the model after it."""
        expected: dict[int, Expected] = {}
        for request_id in plan.ids:
            live = self.live.get(request_id)
            if live is None:
                continue
            live.in_flight = False
            if message := answers.failed.get(request_id):
                expected[request_id] = Expected(reason=FinishReason.ERROR, message=message)
            else:
                expected[request_id] = accepted(live, answers.tokens[request_id])
                live.tokens += expected[request_id].tokens
            if expected[request_id].reason:
                del self.live[request_id]
        return expected

    def _drain(self) -> None:
        """Select and return until nothing happens: every round must come closer to the end."""
        most = 2 * sum(live.request.max_tokens for live in self.live.values()) + 8
        for _ in range(most):
            if self._select():
                continue
            if not self.flight:
                break
            self._return(answer_plainly(self.flight[0]))
        assert not self.flight
        assert not self.live, "live requests that nothing moves"

    def _check_empty(self) -> None:
        pool = self.scheduler.pool
        assert self.memory.used == 0
        assert not self.memory.held
        assert self.memory.num_allocated == self.memory.num_released
        assert len(pool) == pool.num_waiting == pool.num_admitted == 0
        assert self.scheduler.plans_in_flight == 0
        assert self.scheduler._prefill_tokens == 0
        assert pool.first_runnable() is None
        assert not pool._runnable

    def _run_one_of_full_size(self) -> None:
        capacity = self.memory.capacity
        if capacity < 2:
            return
        self._submit([PLAIN] * (capacity - 1), 1, frozenset())
        self._drain()
        self._flush_drops()


def test_machine() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
