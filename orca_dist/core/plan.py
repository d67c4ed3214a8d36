"""A plan: what one iteration does, as every stage receives it.

Plans are deltas with three verbs. `drop` forgets a request, `admit` introduces
one with all its known tokens and KV blocks, `step` computes tokens
[start, start + length) of one. Steps are columns, since they are the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orca_dist.core.request import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """A request new to the stages."""

    id: int
    sampling: Sampling
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration. Position i of each column belongs to the request ids[i].

    `new_tokens` and `new_blocks` are flat; their `num_` columns say how many
    belong to each entry. Only an entry with `samples[i]` returns tokens.
    """

    seq: int
    drops: list[int] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the iteration's flat [ΣL, H] input."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The last stage's answer: tokens of the entries that sampled, 0..k each.

    `failed` maps requests that the iteration ruined for themselves alone to a message.
    """

    seq: int
    ids: list[int]
    tokens: list[list[int]]
    failed: dict[int, str] = field(default_factory=dict)
    logits: dict[int, bytes] = field(default_factory=dict)
