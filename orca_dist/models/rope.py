"""Rotary frequencies of a spec: theta^(-2i/D), stretched as its rope type says.

A frequency depends on the model alone, never on a request's length, so that a token's
bits don't depend on what runs beside it. Shapes: I = D / 2 frequencies of a head of size D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, floor, log, pi

import torch

from orca_dist.spec import RopeSpec, RopeType


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """fp32 [I]: what a position is multiplied by to give each pair's angle."""
    exponents_I = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return _SCALED[rope.rope_type](1.0 / rope.theta**exponents_I, rope)


def _plain(inverse_I: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    return inverse_I


def _linear(inverse_I: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Positions squeezed by the factor."""
    return inverse_I / rope.factor


def _llama3(inverse_I: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long waves squeezed, short ones kept, and a ramp between them."""
    turns_I = rope.original_max_len * inverse_I / (2 * pi)
    kept_I = (turns_I - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(inverse_I, rope.factor, kept_I.clamp(0, 1))


def _yarn(inverse_I: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """YaRN (arXiv:2309.00071), section 3.2: the ramp runs over dimensions."""
    num_dims = 2 * len(inverse_I)
    first, last = (_dim_of(rope, turns, num_dims) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, num_dims - 1)
    width = last - first or 0.001
    squeezed_I = (torch.arange(len(inverse_I), dtype=torch.float32) - first) / width
    return _blend(inverse_I, rope.factor, 1 - squeezed_I.clamp(0, 1))


def _dim_of(rope: RopeSpec, turns: float, num_dims: int) -> float:
    """The pair whose wave turns that often within the original length."""
    return num_dims * log(rope.original_max_len / (turns * 2 * pi)) / (2 * log(rope.theta))


def _longrope(inverse_I: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    return inverse_I / torch.tensor(rope.divisors)


def _blend(inverse_I: torch.Tensor, factor: float, kept_I: torch.Tensor) -> torch.Tensor:
    """`kept_I` 1: as it was; 0: divided by the factor."""
    return inverse_I / factor * (1 - kept_I) + inverse_I * kept_I


_SCALED: Mapping[RopeType, Callable[[torch.Tensor, RopeSpec], torch.Tensor]] = {
    RopeType.DEFAULT: _plain,
    RopeType.LINEAR: _linear,
    RopeType.DYNAMIC: _plain,  # it begins beyond the model's length, which no request may exceed
    RopeType.LLAMA3: _llama3,
    RopeType.YARN: _yarn,
    RopeType.LONGROPE: _longrope,
}
