"""The pieces of a decoder layer that see the whole flat batch (Orca §3, S2).

Shapes: T rows of the batch, H hidden, K inputs and F outputs of a matmul, N
heads of size D. Every function treats each row alike whatever the batch, so a
request's bits don't depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

MIN_PACKED_ROWS = 2  # oneDNN takes another kernel, with other rounding, for a single row
SERIAL_ELEMENTS = 32767  # elementwise operations on more are cut over threads, anywhere in a row

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [T, 1, D]


class Linear:
    """y = x W^T + b, with W packed once for oneDNN on CPU."""

    def __init__(self, weight_FK: torch.Tensor, bias_F: torch.Tensor | None = None) -> None:
        self.packed = _can_pack(weight_FK)
        self.bias = bias_F
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_FK, None) if self.packed else weight_FK
        )

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, F]."""
        if not self.packed:
            return linear(x_TK, self.weight, self.bias)
        num_rows = x_TK.shape[0]
        if num_rows < MIN_PACKED_ROWS:
            x_TK = x_TK.expand(MIN_PACKED_ROWS, -1).contiguous()
        y_TF = torch.ops.mkldnn._linear_pointwise(x_TK, self.weight, self.bias, "none", [], "")
        return y_TF[:num_rows]


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def rms_norm(
    x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, rounds_late: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight, computed in fp32 up to the weight, or with it."""
    wide = x_TH.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounds_late:
        return (weight_H * normed).to(x_TH.dtype)
    return weight_H * normed.to(x_TH.dtype)


def scaled(x_TH: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, free of cost where that is x."""
    return x_TH if factor == 1.0 else x_TH * factor


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return _silu(gate) * up


def _silu(x_TF: torch.Tensor) -> torch.Tensor:
    """In pieces of whole rows on CPU: next to a cut inside a row, silu rounds differently."""
    if x_TF.is_cuda or x_TF.numel() <= SERIAL_ELEMENTS or torch.get_num_threads() == 1:
        return silu(x_TF)
    num_rows = max(1, SERIAL_ELEMENTS // x_TF.shape[1])
    return torch.cat([silu(rows) for rows in x_TF.split(num_rows)])


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


def rotate(x_TND: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turns each pair (i, i + D / 2) of every head by its angle."""
    cos, sin = rotation
    left, right = x_TND.chunk(2, dim=-1)
    return (x_TND * cos + torch.cat([-right, left], dim=-1) * sin).to(x_TND.dtype)
