"""When requests join, how large a batch may be, and how prompts are cut: the batching policies.

`iteration` is Orca's (§4.1): requests join and leave between any two iterations.
`request` is what the paper compares with (FasterTransformer): a batch stays
together until its longest member ends. `dynamic` (Triton) is the same, but waits
a moment for the batch to fill.

Forming, for `iteration`: `paper` is Algorithm 1's rule, fill up to
max_batch_size. `balanced` shares the admitted requests out over the plans in
flight: filling up leaves batches of 61, 1, 1 and 1 for ever once one slot frees
at a time, and three of four stages idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Batching(StrEnum):
    """Who may join a batch, and when."""

    ITERATION = "iteration"
    REQUEST = "request"
    DYNAMIC = "dynamic"


class Forming(StrEnum):
    """How select() sizes the next batch."""

    BALANCED = "balanced"
    PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of the schedule; `inflight` is the paper's n_workers.

    With `chunked_prefill`, max_batch_tokens bounds every plan, and with `chunk_overlap` the
    next chunk of a prompt doesn't wait for the one before. `micro_batch_size`: requests of a
    plan in `request` and `dynamic`; None: max_batch_size. `waiting_served_ratio`: requests
    join only when so many times the admitted ones wait, or the first of them has waited for
    `max_waiting_iterations` plans. A step of priority is worth `ageing_s` of waiting.
    """

    inflight: int
    max_batch_size: int
    max_batch_tokens: int
    batching: Batching = Batching.ITERATION
    forming: Forming = Forming.BALANCED
    min_chunk: int = 256
    chunked_prefill: bool = True
    chunk_overlap: bool = True
    micro_batch_size: int | None = None
    batch_window_s: float = 0.0
    waiting_served_ratio: float = 0.0
    max_waiting_iterations: int = 20
    ageing_s: float = 10.0
    refuse_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The counts that a policy decides by.

    `prefill_tokens`: of admitted requests, not yet scheduled. `head_since_s` and
    `head_waited`: since when, and for how many plans, the first in the line has waited.
    """

    waiting: int
    admitted: int
    prefill_tokens: int
    head_since_s: float
    head_waited: int


@dataclass(frozen=True, slots=True)
class BatchCaps:
    """Most requests, and most prompt tokens, in the next batch."""

    num_requests: int
    prefill_tokens: int


class Policy(Protocol):
    """What the scheduler asks of a batching policy."""

    @property
    def overlap(self) -> bool:
        """A request may be in several plans at once, with different chunks of its prompt."""
        ...

    def admissions(self, load: Load, now: float) -> int:
        """How many waiting requests may join now."""
        ...

    def joined(self, prompt_lens: Sequence[int]) -> None:
        """So many have joined, with prompts of these lengths."""
        ...

    def caps(self, load: Load) -> BatchCaps:
        """Bounds of the next batch."""
        ...

    def chunk(self, start: int, left: int, budget: int, *, first_prompt: bool) -> int:
        """How many of the `left` tokens of a prompt to schedule; 0: not in this batch.

        `start` of it are scheduled already; `budget` is what the caps leave; `first_prompt`:
        no other is in the batch.
        """
        ...

    def wakeup_s(self, load: Load) -> float | None:
        """When to ask again though nothing has happened."""
        ...


class IterationLevel:
    """Orca: join and leave between any two iterations."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._limit = config.inflight * config.max_batch_size

    @property
    def overlap(self) -> bool:
        return self._config.chunked_prefill and self._config.chunk_overlap

    def admissions(self, load: Load, now: float) -> int:
        return self._limit - load.admitted if self._open(load) else 0

    def joined(self, prompt_lens: Sequence[int]) -> None:
        pass

    def caps(self, load: Load) -> BatchCaps:
        """`balanced` counts admitted requests, not free places: ceil(admitted / inflight) each.

        Of the waiting prompt tokens about half as much, though `min_chunk` always may go: a
        first token waits for all chunks of its prompt, and inflight - 1 times the largest.
        """
        config = self._config
        if config.forming is Forming.PAPER:
            return BatchCaps(config.max_batch_size, config.max_batch_tokens)
        share = max(config.min_chunk, -(-load.prefill_tokens // (2 * config.inflight - 1)))
        return BatchCaps(
            min(config.max_batch_size, -(-load.admitted // config.inflight)),
            min(config.max_batch_tokens, share),
        )

    def chunk(self, start: int, left: int, budget: int, *, first_prompt: bool) -> int:
        """What the budget allows. Whole prompts: those that fit, and the first of a batch.

        Without the exception the decodes before a long prompt, which are runnable again every
        round trip, would shut it out for ever.
        """
        if self._config.chunked_prefill:
            return min(left, budget)
        return left if first_prompt or left <= budget else 0

    def wakeup_s(self, load: Load) -> float | None:
        return None

    def _open(self, load: Load) -> bool:
        config = self._config
        return (
            load.waiting >= config.waiting_served_ratio * load.admitted
            or load.head_waited >= config.max_waiting_iterations
        )


class RequestLevel:
    """FasterTransformer: the next batch joins when the last member of this one has ended.

    The first iteration takes as many tokens of each prompt as the batch's shortest has; what
    is left of the longer ones is fed a token an iteration, in step with the others' answers.
    A batch goes through the stages in micro-batches. Kinder than the original in two things:
    an answer is returned as soon as it ends, and nothing is computed for it any more.
    """

    overlap = False

    def __init__(self, config: SchedulerConfig, *, window_s: float) -> None:
        self._config = config
        self._window_s = window_s
        self._shortest = 0

    def admissions(self, load: Load, now: float) -> int:
        size = self._config.max_batch_size
        full = load.waiting >= size or now >= load.head_since_s + self._window_s
        return size if full and not load.admitted else 0

    def joined(self, prompt_lens: Sequence[int]) -> None:
        self._shortest = min(prompt_lens)

    def caps(self, load: Load) -> BatchCaps:
        config = self._config
        size = config.micro_batch_size or config.max_batch_size
        return BatchCaps(min(size, config.max_batch_size), config.max_batch_tokens)

    def chunk(self, start: int, left: int, budget: int, *, first_prompt: bool) -> int:
        return min(left, budget, max(1, self._shortest - start))

    def wakeup_s(self, load: Load) -> float | None:
        waits = load.waiting and not load.admitted and self._window_s
        return load.head_since_s + self._window_s if waits else None


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that the configuration names."""
    match config.batching:
        case Batching.ITERATION:
            return IterationLevel(config)
        case Batching.REQUEST:
            return RequestLevel(config, window_s=0.0)
        case Batching.DYNAMIC:
            return RequestLevel(config, window_s=config.batch_window_s)
