"""What a decoder does around its kernels: fused weights, multipliers, caps, and rotations.

Shapes: T rows of the batch, D head size, R rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import frexp, ldexp

import torch
from orca_kernels import Kernels, Linear, Rotation

Weights = Mapping[str, torch.Tensor]


def fused(kernels: Kernels, weights: Weights, prefix: str, *names: str) -> Linear:
    """One matmul for several that share their input."""
    has_bias = f"{prefix}{names[0]}_bias" in weights
    bias = joined([weights[f"{prefix}{name}_bias"] for name in names]) if has_bias else None
    return kernels.linear(joined([weights[prefix + name] for name in names]), bias)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One below the other; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def scaled(x_TH: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, free of cost where that is x."""
    return x_TH if factor == 1.0 else x_TH * factor


def rounded(factor: float, dtype: torch.dtype) -> float:
    """To the nearest number that the type holds, ties to even; factor > 0."""
    mantissa, exponent = frexp(factor)
    steps = 2 / torch.finfo(dtype).eps  # of a mantissa, which is in [1/2, 1)
    return ldexp(round(mantissa * steps) / steps, exponent)


def cap_logits(logits_RV: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(logits / softcap), in place."""
    return logits_RV.div_(softcap).tanh_().mul_(softcap)


class Rotary:
    """The rotation of each position: cos and sin of its angles, looked up in tables."""

    def __init__(
        self,
        inverse_I: torch.Tensor,
        *,
        max_len: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`inverse_I` are a head's D / 2 frequencies; `scale` multiplies cos and sin.

        Heads of less precision than `dtype` are rotated in it, and rounded after that.
        """
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_I
        self._cos = (angles.cos() * scale).to(device, dtype)
        self._sin = (angles.sin() * scale).to(device, dtype)

    def __call__(self, positions_T: torch.Tensor) -> Rotation:
        """For each row of the batch; the same for all layers."""
        halves = (self._cos[positions_T, None], self._sin[positions_T, None])
        cos, sin = (torch.cat([half, half], dim=-1) for half in halves)
        return cos, sin
