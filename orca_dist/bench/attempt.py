"""One request of a load as its client saw it, and the times that follow from that."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Seconds since the run's start.

    `due_s`: when it was to go (closed loop: once a client was free, too). `token_s`: when each
    token was there. `ended_s` None: it is still out. `error`: its status; "" where all is well.
    Times count from `due_s`, not from `sent_s`: a generator that is late must not make the
    server look faster.
    """

    prompt_len: int
    out: int
    due_s: float
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    ended_s: float | None = None
    error: str = ""

    @property
    def is_answered(self) -> bool:
        """Every token is there; only then have the times below a meaning."""
        return self.ended_s is not None and not self.error

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time for each token but the first; None for an answer of one."""
        if self.out == 1:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.out - 1)

    @property
    def latency_s(self) -> float:
        return self.token_s[-1] - self.due_s

    @property
    def normalized_latency_s(self) -> float:
        """The whole time over the tokens (Orca §6.2)."""
        return self.latency_s / self.out

    def gaps_s(self) -> list[float]:
        """Between tokens; those that one message brought are 0 apart."""
        return [after - before for before, after in pairwise(self.token_s)]

    @property
    def heard_s(self) -> float:
        """When it was heard of last, whatever became of it."""
        if self.ended_s is not None:
            return self.ended_s
        return self.token_s[-1] if self.token_s else self.sent_s
