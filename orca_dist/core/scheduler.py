"""Algorithm 1 of the Orca paper (§4.2) as a handful of verbs.

Owns all scheduling state: the pool, the memory, the plans in flight and the
drops not yet told to the stages. Selection is first come, first served per
iteration: no plan holds a later request while an earlier runnable one is left
out, so select() breaks where something doesn't fit and never skips.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from orca_dist.core.deadlines import TooLate
from orca_dist.core.events import Output
from orca_dist.core.flight import Flight
from orca_dist.core.kv import Lease, Memory, NeverFits
from orca_dist.core.plan import Admit, Plan, PlanResult
from orca_dist.core.policy import BatchCaps, Load, SchedulerConfig, make_policy
from orca_dist.core.pool import RequestPool
from orca_dist.core.request import Entry, FinishReason, Request
from orca_dist.core.suspects import MAX_FATAL, Suspects

NOTHING: list[int] = []
NOBODY = (-1, 0)
SMOOTHING = 0.1  # weight of the newest round trip in their average


class Scheduler:
    """Pure: no clock, no threads. Same events in, same plans out."""

    def __init__(self, *, config: SchedulerConfig, memory: Memory) -> None:
        self.config = config
        self.memory = memory
        self.pool = RequestPool(ageing_s=config.ageing_s)
        self.num_preempted = 0
        self.round_trip_s = 0.0  # of a plan, as an average that forgets
        self._policy = make_policy(config)
        self._in_flight: deque[Flight] = deque()
        self._drops: list[int] = []
        self._seq = 0
        self._selected_s = -math.inf
        self._prefill_tokens = 0  # of admitted requests, not yet scheduled
        self._stuck = NOBODY  # who did not fit, in how many free blocks
        self._suspects = Suspects()

    @property
    def plans_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_entries(self) -> int:
        """In all tables that have one for a request or a plan: 0 once all have left."""
        tables = (self._in_flight, self._drops, self._suspects)
        return self.pool.num_entries + sum(len(table) for table in tables)

    # ---- verbs ---------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Take a request into the pool.

        Raises NeverFits when it can't ever be served, and with refuse_late TooLate when
        its max_tokens iterations, at the pace of late, would end after its deadline.
        """
        if request.max_len > self.memory.capacity:
            raise NeverFits(request.max_len, self.memory.capacity)
        if self.config.refuse_late and request.deadline_s is not None:
            needed_s, left_s = request.max_tokens * self.round_trip_s, request.deadline_s - now
            if needed_s > left_s:
                raise TooLate(needed_s, left_s)
        self.pool.add(request, now, self._seq)

    def select(self, now: float) -> Plan | None:
        """The next batch to run, or None: pipeline full, or nothing runnable."""
        self._selected_s = now
        if len(self._in_flight) >= self.config.inflight or self._suspect_runs():
            return None
        self._admit(now)
        if not self.pool.runnable():
            return None
        plan = Plan(seq=self._seq, drops=self._drops)
        entries = self._form(plan, self._policy.caps(self._load()))
        if not entries:
            return None
        self._told(plan)
        sampled = [id for id, samples in zip(plan.ids, plan.samples, strict=True) if samples]
        self._in_flight.append(Flight(plan, entries, sampled, now))
        return plan

    def flush_drops(self) -> Plan | None:
        """A plan of drops alone, for when no other will come soon. It never counts as in flight."""
        if not self._drops or self._in_flight:
            return None
        return self._told(Plan(seq=self._seq, drops=self._drops))

    def on_result(self, result: PlanResult, now: float) -> list[Output]:
        """Account for a returned plan. Results of an earlier epoch are no-ops."""
        if not self._in_flight or result.seq < self._in_flight[0].plan.seq:
            return []
        flight = self._in_flight.popleft()
        flight.check_answered(result)
        self.round_trip_s += (now - flight.sent_s - self.round_trip_s) * SMOOTHING
        for entry, length in zip(flight.entries, flight.plan.lengths, strict=True):
            entry.computed_len += length
        if self._suspects:
            self._suspects.clear(flight.plan.ids)
        outputs = self._failed(result) if result.failed else []
        logits = self._logits(flight, result) if result.logits else {}
        self._accept(result, logits, outputs)
        outputs += [Output(id=id, logits=rows) for id, rows in logits.items()]
        if not self._policy.overlap:
            self._queue_unfinished(flight)
        return outputs

    def cancel(self, request_id: int, now: float) -> bool:
        """Take a request out in whatever state it is; False if it isn't live any more."""
        entry = self.pool.get(request_id)
        if entry is None:
            return False
        self._leave(entry)
        return True

    def finish(
        self, request_id: int, num_tokens: int, reason: FinishReason, now: float
    ) -> Output | None:
        """End a request from outside after `num_tokens` generated ones (a stop string).

        Tokens sampled since are dropped and not counted. None if it isn't live any more.
        """
        entry = self.pool.get(request_id)
        if entry is None or num_tokens > len(entry.generated):
            return None
        self._leave(entry)
        return Output(id=request_id, reason=reason)

    def expire(self, now: float) -> list[Output]:
        """End the requests whose deadline has passed: no plan selected from now on has them."""
        outputs = []
        for request_id in self.pool.deadlines.passed(now):
            entry = self.pool.entries[request_id]
            self._leave(entry)
            message = f"the deadline passed after {len(entry.generated)} tokens"
            outputs.append(Output(request_id, reason=FinishReason.DEADLINE, message=message))
        return outputs

    def next_wakeup(self) -> float | None:
        """When to call expire() and select() again though nothing else has happened."""
        times = [self.pool.deadlines.first_s()]
        window_s = self._policy.wakeup_s(self._load())
        if window_s is not None and window_s > self._selected_s:  # else it waits for something else
            times.append(window_s)
        return min((time for time in times if time is not None), default=None)

    @property
    def seqs_in_flight(self) -> list[int]:
        """Of the plans that have not returned, oldest first."""
        return [flight.plan.seq for flight in self._in_flight]

    def restart(self, now: float, fatal: Collection[int] = ()) -> list[Output]:
        """A new epoch: every live request starts over from its known tokens.

        `fatal`: seqs of the plans that the lost stages were computing, as far as can be told.
        Their requests are suspects: each runs alone in the whole pipeline until one of its plans
        returns. Who has been alone in a fatal plan MAX_FATAL times fails.
        """
        outputs = self._accuse(fatal)
        self._in_flight.clear()
        self._drops.clear()
        self._prefill_tokens = 0
        self._stuck = NOBODY
        self.memory.reset()
        self.pool.restart(self._seq)
        return outputs

    # ---- select, step 1: admit -----------------------------------------

    def _admit(self, now: float) -> None:
        """Move requests in order from waiting to admitted while memory lasts."""
        if not self.pool.num_waiting:
            return
        joined: list[Entry] = []
        for _ in range(self._policy.admissions(self._load(), now)):
            entry = self.pool.head()
            if entry is None or not self._join(entry):
                break
            joined.append(entry)
        if joined:
            self._policy.joined([entry.prefill_len for entry in joined])

    def _join(self, entry: Entry) -> bool:
        """Give it memory; after preemption not before its plans in flight are back."""
        memory = self.memory
        stuck_id, stuck_free = self._stuck
        if entry.in_flight_len or (entry.id == stuck_id and memory.num_free <= stuck_free):
            return False  # no more is free than when it did not fit: its prefix needs no new look
        lease = memory.allocate(
            entry.known, entry.known_len, entry.request.max_len, entry.max_cached
        )
        if lease is None:
            self._stuck = entry.id, memory.num_free
            return False
        entry.prefill_len = entry.known_len
        self._prefill_tokens += entry.known_len
        self.pool.admit(entry, lease)
        return True

    def _load(self) -> Load:
        return self.pool.load(prefill_tokens=self._prefill_tokens, next_seq=self._seq)

    def _told(self, plan: Plan) -> Plan:
        """It goes to the stages, and the drops with it."""
        self._seq += 1
        self._drops = []
        return plan

    # ---- select, step 2: form ------------------------------------------

    def _form(self, plan: Plan, caps: BatchCaps) -> list[Entry]:
        """Runnable requests in order up to the caps; `plan` gets their steps.

        Who is in the middle of its prompt comes on top of the balanced cap, which is for
        requests that are in one plan a round trip.
        """
        batch: list[Entry] = []
        suspects = self._suspects
        num_left, max_size = caps.num_requests, self.config.max_batch_size
        tokens_left, prefill_left = self.config.max_batch_tokens, caps.prefill_tokens
        for entry in self.pool.runnable():
            start = entry.scheduled_len
            in_prompt = start < entry.prefill_len
            counts = not (in_prompt and start)
            if len(batch) >= max_size or (counts and num_left <= 0):
                break
            if suspects and entry.id in suspects:
                if batch or self._in_flight:
                    break
                max_size = 1
            if in_prompt:
                first = prefill_left == caps.prefill_tokens
                length = self._step_prompt(plan, entry, min(tokens_left, prefill_left), first)
                prefill_left -= length
            else:
                length = self._step_answer(plan, entry, tokens_left)
            if length <= 0:
                break
            tokens_left -= length
            num_left -= counts
            batch.append(entry)
        self._taken(plan, batch)
        return batch

    def _taken(self, plan: Plan, batch: list[Entry]) -> None:
        """They aren't runnable any more, but those whose next chunk needs no token."""
        self.pool.take(batch)
        if self._policy.overlap and not all(plan.samples):
            pairs = zip(batch, plan.samples, strict=True)
            self.pool.set_runnable([entry for entry, samples in pairs if not samples])

    def _step_prompt(self, plan: Plan, entry: Entry, budget: int, first_prompt: bool) -> int:
        """A chunk of what was known at admission; 0: not in this batch."""
        lease, start = entry.lease, entry.scheduled_len
        assert lease is not None, "runnable without memory"
        if not start:
            self.memory.reuse(lease, entry.known, entry.max_cached)
            start = lease.cached_len
        left = entry.prefill_len - start
        length = self._policy.chunk(start, left, budget, first_prompt=first_prompt)
        if length <= 0:
            return 0
        if not entry.scheduled_len:
            self._introduce(plan, entry, lease)
        end = entry.scheduled_len = start + length
        self._prefill_tokens -= length
        plan.add(entry.id, start, length, end == entry.known_len)
        self.memory.publish(lease, entry.known, end)
        return length

    def _introduce(self, plan: Plan, entry: Entry, lease: Lease) -> None:
        """The stages get all that is known of it; what is cached counts as computed."""
        plan.admits.append(
            Admit(
                id=entry.id,
                sampling=entry.request.sampling,
                tokens=entry.known(0, entry.known_len),
                blocks=tuple(lease.blocks),
            )
        )
        if not entry.generated:
            entry.cached_len = lease.cached_len
        entry.computed_len = lease.cached_len
        self._prefill_tokens -= lease.cached_len

    def _step_answer(self, plan: Plan, entry: Entry, budget: int) -> int:
        """Tokens sampled since its last step, one as a rule; 0: not in this batch."""
        lease, start = entry.lease, entry.scheduled_len
        assert lease is not None, "runnable without memory"
        since = start - len(entry.request.prompt)
        new_tokens = entry.generated[since : since + budget] if budget > 0 else NOTHING
        length = len(new_tokens)
        end = start + length
        new_blocks: list[int] | None = NOTHING
        if end > lease.room:
            new_blocks = self._extend(entry, lease, end)
        if not length or new_blocks is None:
            return 0
        entry.scheduled_len = end
        plan.add(entry.id, start, length, end == entry.known_len, new_tokens, new_blocks)
        return length

    # ---- memory runs out -----------------------------------------------

    def _extend(self, entry: Entry, lease: Lease, num_slots: int) -> list[int] | None:
        """More blocks, at the cost of those who came last; None: that was `entry` itself."""
        self.memory.publish(lease, entry.known, entry.scheduled_len)
        while (blocks := self.memory.extend(lease, num_slots)) is None:
            victim = self.pool.last_admitted()
            self._preempt(victim)
            if victim is entry:
                return None
        return blocks

    def _preempt(self, entry: Entry) -> None:
        """Back to the line without memory; it will be computed anew from its known tokens.

        Its plans in flight go on, and a token that returns with one of them counts.
        """
        self.num_preempted += 1
        self._give_up_memory(entry)
        self.pool.put_back(entry, self._seq)

    def _give_up_memory(self, entry: Entry, *, spoiled: bool = False) -> None:
        """Memory goes back once, and the stages are told."""
        lease = entry.lease
        assert lease is not None, "only who is admitted has memory"
        if not spoiled:
            self.memory.publish(lease, entry.known, entry.scheduled_len)
        self.memory.release(lease, spoiled=spoiled)
        self._prefill_tokens -= entry.prefill_left
        if entry.scheduled_len:
            self._drops.append(entry.id)

    # ---- results -------------------------------------------------------

    def _accept(self, result: PlanResult, logits: dict[int, bytes], outputs: list[Output]) -> None:
        """Sampled tokens; results for requests that left since are no-ops."""
        entries = self.pool.entries
        again: list[Entry] = []
        for request_id, tokens in zip(result.ids, result.tokens, strict=True):
            entry = entries.get(request_id)
            if entry is None:
                continue
            kept, reason = entry.accept(tokens)
            if reason:
                self._leave(entry)
            elif entry.lease is not None:
                again.append(entry)
            rows = logits.pop(request_id, b"") if logits else b""
            outputs.append(Output(request_id, kept, reason, "", entry.cached_len, rows))
        self.pool.set_runnable(again)

    def _logits(self, flight: Flight, result: PlanResult) -> dict[int, bytes]:
        """Rows of positions that did not go out before, by request; resumed ones come twice."""
        plan, fresh = flight.plan, {}
        for request_id, start, length in zip(plan.ids, plan.starts, plan.lengths, strict=True):
            entry, rows = self.pool.get(request_id), result.logits.get(request_id)
            if entry and rows:
                fresh[request_id] = entry.fresh_logits(start, length, rows)
        return fresh

    def _failed(self, result: PlanResult) -> list[Output]:
        """Requests that an iteration ruined for themselves alone; their KV is not to be shared."""
        outputs = []
        for request_id, message in result.failed.items():
            if entry := self.pool.get(request_id):
                self._leave(entry, spoiled=True)
                outputs.append(Output(request_id, reason=FinishReason.ERROR, message=message))
        return outputs

    def _queue_unfinished(self, flight: Flight) -> None:
        """Without overlap, the next chunk of a prompt may go once the one before is back."""
        self.pool.set_runnable([entry for entry in flight.unfinished if entry.lease is not None])

    def _accuse(self, fatal: Collection[int]) -> list[Output]:
        """Note who was in the fatal plans; who is guilty leaves."""
        outputs = []
        message = f"a stage was lost {MAX_FATAL} times while it computed this request alone"
        for plan in [flight.plan for flight in self._in_flight if flight.plan.seq in fatal]:
            live = [id for id in plan.ids if self.pool.get(id)]
            for id in self._suspects.accuse(plan.ids, live):
                self._leave(self.pool.entries[id])
                outputs.append(Output(id, reason=FinishReason.ERROR, message=message))
        return outputs

    def _suspect_runs(self) -> bool:
        ids = self._in_flight[-1].plan.ids if self._suspects and self._in_flight else ()
        return any(id in self._suspects for id in ids)

    def _leave(self, entry: Entry, *, spoiled: bool = False) -> None:
        """The one way out of the pool."""
        self._suspects.clear([entry.id])
        if entry.lease is not None:
            self._give_up_memory(entry, spoiled=spoiled)
        self.pool.remove(entry)
