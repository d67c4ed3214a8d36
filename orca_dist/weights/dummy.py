"""Random weights of the right shapes, for trying a model's size without its files.

Each tensor is drawn from its own seed, by its name: the same weights on any number of
stages, and in every run.
"""

from __future__ import annotations

import zlib

import torch

SPREAD = 0.02  # of matrices: small enough that activations stay finite through any depth


def dummy_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """That of Hugging Face's `name`: a matrix random, a norm 1, a bias 0."""
    if len(shape) == 1:
        return torch.full(shape, float(not name.endswith("bias")), dtype=dtype)
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=dtype).uniform_(-SPREAD, SPREAD, generator=seeded)
