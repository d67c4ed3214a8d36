"""What the gate of an MLP may go through."""

from __future__ import annotations

from enum import StrEnum


class Activation(StrEnum):
    """Each is g * sigmoid(z): z is g itself of SiLU, 2 sqrt(2 / pi) (g + 0.044715 g³) of GELU's
    tanh form."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
