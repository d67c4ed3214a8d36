"""Random weights of the right shapes, for trying a model's size without its files.

Each tensor is drawn from its own seed, by its name: the same weights on any number of
stages, and in every run.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch

SPREAD = 0.02  # of matrices: small enough that activations stay finite through any depth


def dummy_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    names: Iterable[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The tensors of `names` (Hugging Face's): matrices random, norms 1, biases 0."""
    return {
        name: _tensor(name, shapes[name], dtype).to(device=device) for name in dict.fromkeys(names)
    }


def _tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if len(shape) == 1:
        return torch.full(shape, float(not name.endswith("bias")), dtype=dtype)
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=dtype).uniform_(-SPREAD, SPREAD, generator=seeded)
