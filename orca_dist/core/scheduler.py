"""Algorithm 1 of the Orca paper (§4.2) as a handful of verbs.

Owns all scheduling state: the pool, the memory, the plans in flight and the
drops not yet told to the stages. Selection is first come, first served per
iteration: no plan holds a later request while an earlier runnable one is left
out, so select() breaks where something doesn't fit and never skips.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orca_dist.core.events import Output
from orca_dist.core.kv import Memory, NeverFits
from orca_dist.core.plan import Admit, Plan, PlanResult
from orca_dist.core.policy import Forming, batch_caps
from orca_dist.core.pool import RequestPool
from orca_dist.core.request import Entry, FinishReason, Phase, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of the schedule; `inflight` is the paper's n_workers."""

    inflight: int
    max_batch_size: int
    max_batch_tokens: int
    forming: Forming = Forming.BALANCED
    min_chunk: int = 256


class Scheduler:
    """Pure: no clock, no threads. Same events in, same plans out."""

    def __init__(self, *, config: SchedulerConfig, memory: Memory) -> None:
        self.config = config
        self.memory = memory
        self.pool = RequestPool()
        self._in_flight: deque[Plan] = deque()
        self._drops: list[int] = []
        self._seq = 0
        self._prefill_tokens = 0  # of admitted requests, not yet scheduled

    @property
    def plans_in_flight(self) -> int:
        return len(self._in_flight)

    # ---- verbs ---------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Take a request into the pool; raises NeverFits when it can't ever be served."""
        if request.max_len > self.memory.capacity:
            raise NeverFits(request.max_len, self.memory.capacity)
        self.pool.add(request)

    def select(self, now: float) -> Plan | None:
        """The next batch to run, or None: pipeline full, or nothing runnable."""
        if len(self._in_flight) >= self.config.inflight:
            return None
        self._admit()
        batch = self._form()
        if not batch:
            return None
        plan = self._plan(batch)
        self._in_flight.append(plan)
        return plan

    def flush_drops(self) -> Plan | None:
        """A plan of drops alone, for when no other will come soon. It never counts as in flight."""
        return self._new_plan() if self._drops and not self._in_flight else None

    def on_result(self, result: PlanResult, now: float) -> list[Output]:
        """Account for a returned plan. Results of an earlier epoch are no-ops."""
        if not self._in_flight or result.seq < self._in_flight[0].seq:
            return []
        plan = self._in_flight.popleft()
        _check_answered(plan, result)
        for request_id, length in zip(plan.ids, plan.lengths, strict=True):
            if entry := self.pool.get(request_id):
                entry.computed_len += length
        outputs = [self._fail(request_id, text) for request_id, text in result.failed.items()]
        for request_id, tokens in zip(result.ids, result.tokens, strict=True):
            outputs.append(self._accept(request_id, tokens, result.logits.get(request_id, b"")))
        return [output for output in outputs if output]

    def cancel(self, request_id: int, now: float) -> bool:
        """Take a request out in whatever state it is; False if it isn't live any more."""
        return self._leave(request_id)

    def finish(
        self, request_id: int, num_tokens: int, reason: FinishReason, now: float
    ) -> Output | None:
        """End a request from outside after `num_tokens` generated ones (a stop string).

        Tokens sampled since are dropped and not counted. None if it isn't live any more.
        """
        entry = self.pool.get(request_id)
        if entry is None or num_tokens > entry.num_generated:
            return None
        self._leave(request_id)
        return Output(id=request_id, reason=reason)

    def restart(self, now: float) -> None:
        """A new epoch: every live request starts over from its known tokens."""
        self._in_flight.clear()
        self._drops.clear()
        self._prefill_tokens = 0
        self.memory.reset()
        self.pool.restart()

    # ---- select, step 1: admit -----------------------------------------

    def _admit(self) -> None:
        """Move requests in order from waiting to admitted while memory lasts."""
        limit = self.config.inflight * self.config.max_batch_size
        while self.pool.num_admitted < limit and (entry := self.pool.head()):
            blocks = self.memory.allocate(entry.id, entry.request.max_len)
            if blocks is None:
                return
            self.pool.admit(entry, blocks)
            self._prefill_tokens += entry.known_len

    # ---- select, step 2: form ------------------------------------------

    def _form(self) -> list[Entry]:
        """Runnable requests in order up to the caps.

        The first prompt of a batch goes whole, however long: else the decodes before it,
        which are runnable again every round trip, would shut it out for ever. A prompt above
        max_batch_tokens thus has no other prompt beside it.
        """
        config = self.config
        caps = batch_caps(
            config.forming,
            admitted=self.pool.num_admitted,
            prefill_tokens=self._prefill_tokens,
            inflight=config.inflight,
            max_batch_size=config.max_batch_size,
            max_batch_tokens=config.max_batch_tokens,
            min_chunk=config.min_chunk,
        )
        batch: list[Entry] = []
        tokens_left, prefill_left = config.max_batch_tokens, caps.prefill_tokens
        while len(batch) < caps.num_requests and (entry := self.pool.first_runnable()):
            length = entry.unscheduled_len
            prefill = length if entry.phase is Phase.INITIATION else 0
            first_prompt = prefill > 0 and prefill_left == caps.prefill_tokens
            if batch and not first_prompt and (length > tokens_left or prefill > prefill_left):
                break
            self.pool.take_runnable()
            batch.append(entry)
            tokens_left -= length
            prefill_left -= prefill
        return batch

    def _plan(self, batch: list[Entry]) -> Plan:
        plan = self._new_plan()
        for entry in batch:
            self._step(plan, entry)
        return plan

    def _new_plan(self) -> Plan:
        plan = Plan(seq=self._seq, drops=self._drops)
        self._seq += 1
        self._drops = []
        return plan

    def _step(self, plan: Plan, entry: Entry) -> None:
        new_tokens = self._introduce(plan, entry)
        plan.ids.append(entry.id)
        plan.starts.append(entry.scheduled_len)
        plan.lengths.append(entry.unscheduled_len)
        plan.samples.append(True)
        plan.num_new_tokens.append(len(new_tokens))
        plan.new_tokens.extend(new_tokens)
        plan.num_new_blocks.append(0)
        entry.scheduled_len = entry.known_len

    def _introduce(self, plan: Plan, entry: Entry) -> list[int]:
        """Admit a request on its first step; later ones bring the tokens returned since."""
        if entry.phase is not Phase.INITIATION:
            return entry.tokens[entry.scheduled_len :]
        self._prefill_tokens -= entry.known_len
        plan.admits.append(
            Admit(
                id=entry.id,
                sampling=entry.request.sampling,
                tokens=tuple(entry.tokens),
                blocks=tuple(entry.blocks),
            )
        )
        return []

    # ---- leaving -------------------------------------------------------

    def _accept(self, request_id: int, tokens: list[int], logits: bytes) -> Output | None:
        entry = self.pool.get(request_id)
        if entry is None:
            return None
        kept, reason = entry.accept(tokens)
        if reason:
            self._leave(request_id)
        elif kept:
            self.pool.set_runnable(entry)
        return Output(id=request_id, tokens=tuple(kept), reason=reason, logits=logits)

    def _fail(self, request_id: int, message: str) -> Output | None:
        if not self._leave(request_id):
            return None
        return Output(id=request_id, reason=FinishReason.ERROR, message=message)

    def _leave(self, request_id: int) -> bool:
        """The one way out of the pool: memory goes back once, the stages are told."""
        entry = self.pool.get(request_id)
        if entry is None:
            return False
        self.pool.remove(entry)
        if entry.admitted:
            self.memory.release(entry.id)
        if entry.scheduled_len:
            self._drops.append(entry.id)
        elif entry.admitted:
            self._prefill_tokens -= entry.known_len
        return True


def _check_answered(plan: Plan, result: PlanResult) -> None:
    """A stage that leaves a request without an answer would leave it in the pool for ever."""
    assert plan.seq == result.seq, f"plan {result.seq} came back before plan {plan.seq}"
    asked = {i for i, samples in zip(plan.ids, plan.samples, strict=True) if samples}
    assert asked == {*result.ids, *result.failed}, f"plan {plan.seq} came back incomplete"
    assert all(result.tokens), f"plan {plan.seq} came back without tokens"
