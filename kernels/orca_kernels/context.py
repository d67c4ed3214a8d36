"""What attention has to know about a batch. An argument everywhere, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from orca_kernels.triton.tiles import Tiles

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin of each row's angles, [T, 1, D]


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """R requests whose new tokens lie back to back in T = sum(lengths) rows.

    starts[i], lengths[i]: request i computes positions [start, start + length).
    blocks[i]: int64 tensor of the KV blocks that hold its positions 0, 1, ...
    slots_T: int64, the flat slot (block * block_size + offset) that each row writes.

    tiles: attention's tables, where they are on the device already, over the one tensor of blocks.
    Then there are no starts and lengths: a captured launch has the plan's own in the tables only.
    """

    starts: list[int]
    lengths: list[int]
    blocks: list[torch.Tensor]
    slots_T: torch.Tensor
    tiles: Tiles | None = None

    @cached_property
    def num_pairs(self) -> int:
        """(row, token) pairs to attend over, the triangle of a prompt counted as its square."""
        pairs = zip(self.starts, self.lengths, strict=True)
        return sum(length * (start + length) for start, length in pairs)

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
