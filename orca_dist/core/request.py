"""A request and where it stands (Orca §4.2, algorithm 1).

Owns the paper's three states; they follow from three lengths and are never
stored: known_len >= scheduled_len >= computed_len. Knows nothing of batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from orca_dist.core.kv import Lease


class FinishReason(StrEnum):
    """Why a request left the pool."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Phase(StrEnum):
    """The state field of the paper's Algorithm 1."""

    INITIATION = "initiation"  # nothing of it is scheduled yet
    RUNNING = "running"  # all known tokens are scheduled: waits for its next token
    INCREMENT = "increment"  # has run, and has tokens to run


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the last stage picks a token. Temperature 0 is greedy; top_k 0 keeps all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    return_logits: bool = False


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asked for, in tokens.

    `max_tokens` is the most that will be generated; `stop_ids` end the answer
    and are part of it. `id` is unique for the life of the engine. Of two requests
    the one with the higher `priority` goes first, up to the ageing of the other;
    past `deadline_s`, on the clock of `now`, the request is given up.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline_s: float | None = None

    @property
    def max_len(self) -> int:
        """Slots that the request can come to need."""
        return len(self.prompt) + self.max_tokens


@dataclass(slots=True, eq=False)
class Entry:
    """A live request in the pool. What has the smaller `order` goes first.

    Admitted while it holds a lease. computed_len is behind scheduled_len by the tokens that
    are in flight, also after preemption: it is below zero then until they are back.
    """

    request: Request
    id: int
    order: tuple[float, int]
    known_len: int
    since_seq: int = 0  # the plan that was to come next when it began to wait
    generated: list[int] = field(default_factory=list)
    prefill_len: int = 0  # tokens known at admission: up to here it is prefill
    scheduled_len: int = 0
    computed_len: int = 0
    cached_len: int = 0  # prompt tokens that needed no computing
    logits_len: int = 0  # positions whose logits went out
    queued: bool = False  # among the runnable ones
    lease: Lease | None = None

    @property
    def unscheduled_len(self) -> int:
        return self.known_len - self.scheduled_len

    @property
    def prefill_left(self) -> int:
        """Tokens known at admission that aren't scheduled yet."""
        return max(0, self.prefill_len - self.scheduled_len)

    @property
    def max_cached(self) -> int:
        """Tokens that another's KV may stand for: not the last known one, which samples, and
        none where logits are wanted of all."""
        return 0 if self.request.sampling.return_logits else self.known_len - 1

    @property
    def in_flight_len(self) -> int:
        """Tokens in plans that have not returned."""
        return self.scheduled_len - self.computed_len

    @property
    def phase(self) -> Phase:
        if self.scheduled_len == 0:
            return Phase.INITIATION
        return Phase.INCREMENT if self.unscheduled_len else Phase.RUNNING

    def known(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens [start, end) of prompt and answer."""
        prompt = self.request.prompt
        split = len(prompt)
        if end <= split:
            return prompt[start:end]
        return (*prompt[start:], *self.generated[max(0, start - split) : end - split])

    def accept(self, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """Append sampled tokens up to the one that ends the request; returns those kept."""
        request, generated = self.request, self.generated
        before, reason = len(generated), None
        for token in tokens:
            generated.append(token)
            if token in request.stop_ids:
                reason = FinishReason.STOP
                break
            if len(generated) >= request.max_tokens:
                reason = FinishReason.LENGTH
                break
        num = len(generated) - before
        self.known_len += num
        return (tokens if num == len(tokens) else tokens[:num]), reason

    def fresh_logits(self, start: int, length: int, rows: bytes) -> bytes:
        """Of the rows of positions [start, start + length) those that did not go out before."""
        known = min(length, max(0, self.logits_len - start))
        self.logits_len = max(self.logits_len, start + length)
        return rows[known * (len(rows) // length) :]

    def rewind(self) -> None:
        """Forget all progress but the tokens: they will be computed anew."""
        self.computed_len -= self.scheduled_len
        self.scheduled_len = self.prefill_len = 0
        self.lease = None
