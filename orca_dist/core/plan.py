"""A plan: what one iteration does, as every stage receives it.

Plans are deltas with three verbs. `drop` forgets a request, `admit` introduces
one with all its known tokens and KV blocks, `step` computes tokens
[start, start + length) of one. Steps are columns, since they are the hot path.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def add(
        self,
        request_id: int,
        start: int,
        length: int,
        samples: bool,
        new_tokens: Sequence[int] = (),
        new_blocks: Sequence[int] = (),
    ) -> None:
        """One more entry; `new_tokens` and `new_blocks` are what the stages aren't told yet."""
        self.ids.append(request_id)
        self.starts.append(start)
        self.lengths.append(length)
        self.samples.append(samples)
        self.num_new_tokens.append(len(new_tokens))
        self.num_new_blocks.append(len(new_blocks))
        self.new_tokens.extend(new_tokens)
        self.new_blocks.extend(new_blocks)

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
