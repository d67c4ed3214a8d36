"""This stage's keys and values: blocks of slots for each of its layers (Orca §4.2's manager).

Owns storage only. Which block belongs to whom is decided at the engine master,
and plans arrive in order, so a block may be written again as soon as a plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from orca_kernels import Kernels

from orca_dist.spec import ModelSpec


class KVStore:
    """Shapes: B blocks of S slots, M KV heads of size D.

    `num_scratch` blocks come behind the `num_blocks` that requests may have: they belong to nobody.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        layers: Iterable[int],
        num_blocks: int,
        num_scratch: int = 0,
        block_size: int,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        shape = (num_blocks + num_scratch, block_size, spec.num_kv_heads, spec.head_dim)
        self._layers = {index: kernels.empty_kv(*shape, dtype, device) for index in layers}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer (global index), each [B, S, M, D]."""
        return self._layers[index]
