"""A request and where it stands (Orca §4.2, algorithm 1).

Owns the paper's three states; they follow from three lengths and are never
stored: known_len >= scheduled_len >= computed_len. Knows nothing of batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request left the pool."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asked for, in tokens.

    `max_tokens` is the most that will be generated; `stop_ids` end the answer
    and are part of it. `id` is unique for the life of the engine.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()

    @property
    def max_len(self) -> int:
        """Slots that the request can come to need."""
        return len(self.prompt) + self.max_tokens


@dataclass(slots=True, eq=False)
class Entry:
    """A live request in the pool. Order is arrival order: smaller goes first."""

    request: Request
    order: int
    tokens: list[int]
    scheduled_len: int = 0
    computed_len: int = 0
    blocks: list[int] = field(default_factory=list)
    admitted: bool = False
    alive: bool = True

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def known_len(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unscheduled_len(self) -> int:
        return len(self.tokens) - self.scheduled_len

    @property
    def phase(self) -> Phase:
        if self.scheduled_len == 0:
            return Phase.INITIATION
        return Phase.RUNNING if self.scheduled_len == len(self.tokens) else Phase.INCREMENT

    def accept(self, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """Append sampled tokens up to the one that ends the request; returns those kept."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self.tokens.append(token)
            if token in self.request.stop_ids:
                return kept, FinishReason.STOP
            if self.num_generated >= self.request.max_tokens:
                return kept, FinishReason.LENGTH
        return kept, None

    def rewind(self) -> None:
        """Forget all progress but the tokens: the next epoch computes them anew."""
        self.scheduled_len = self.computed_len = 0
        self.blocks = []
        self.admitted = False
