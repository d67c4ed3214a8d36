"""What attention has to know about a batch. An argument everywhere, never a global."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """R requests whose new tokens lie back to back in T = sum(lengths) rows.

    starts[i], lengths[i]: request i computes positions [start, start + length).
    blocks[i]: int64 tensor of the KV blocks that hold its positions 0, 1, ...
    slots_T: int64, the flat slot (block * block_size + offset) that each row writes.
    """

    starts: list[int]
    lengths: list[int]
    blocks: list[torch.Tensor]
    slots_T: torch.Tensor
