"""What attention has to know about a batch. An argument everywhere, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol, Self

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin of each row's angles, [T, 1, D]


class DecodeTables(Protocol):
    """What attention has to know of decodes, in tensors where a captured launch looks each time."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """What a launch depends on beside the number of rows."""
        ...

    def packed(self) -> torch.Tensor:
        """All in one, int64 [N], as tables of a batch go to the device."""
        ...

    def over(self, packed_N: torch.Tensor) -> Self:
        """The same with tables that are views of such a tensor, whatever it holds."""
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """R requests whose new tokens lie back to back in T = sum(lengths) rows.

    starts[i], lengths[i]: request i computes positions [start, start + length).
    blocks[i]: int64 tensor of the KV blocks that hold its positions 0, 1, ...
    slots_T: int64, the flat slot (block * block_size + offset) that each row writes.

    tables: attention's own, where they are on the device already, over the one tensor of blocks.
    Then there are no starts and lengths: a captured launch has the plan's own in the tables only.
    """

    starts: list[int]
    lengths: list[int]
    blocks: list[torch.Tensor]
    slots_T: torch.Tensor
    tables: DecodeTables | None = None

    @cached_property
    def flat_blocks(self) -> torch.Tensor:
        """All block tables back to back; a single one is not copied."""
        return self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks)

    @cached_property
    def table(self) -> torch.Tensor:
        """(first row, start, length, first of flat_blocks) of each request, int64."""
        first_rows = [0, *accumulate(self.lengths)][:-1]
        first_blocks = [0, *accumulate(len(blocks) for blocks in self.blocks)][:-1]
        columns = [first_rows, self.starts, self.lengths, first_blocks]
        return torch.tensor(columns).T.contiguous()
