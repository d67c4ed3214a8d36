"""A mixture of experts on CPUs: each expert computes the rows that chose it, together.

A row's bits don't depend on the batch or the number of threads: matmul and gate treat each row
alike, and a row's outputs are added up in the order of its own choices.
Shapes: T rows, H hidden, K experts of a row, P = T * K pairs of a row and an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from orca_kernels.activation import Activation
from orca_kernels.experts import Matrices

if TYPE_CHECKING:
    from orca_kernels.dispatch import GateMul, Linear, MakeLinear


class CpuExperts:
    """Of this device's own matmuls. The host reads which rows an expert has."""

    def __init__(
        self,
        linear: MakeLinear,
        gate_mul: GateMul,
        matrices: Iterable[Matrices],
        num_experts: int,
        activation: Activation,
    ) -> None:
        self._mlps: list[tuple[Linear, Linear]] = [
            (linear(gate_up_FH), linear(down_HF)) for gate_up_FH, down_HF in matrices
        ]
        assert len(self._mlps) == num_experts
        self._gate_mul = gate_mul
        self._activation = activation

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for mlp in self._mlps for each in mlp)

    def __call__(
        self, x_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        num_rows, num_chosen = expert_TK.shape
        expert_P = expert_TK.flatten()
        order_P = expert_P.argsort(stable=True)
        counts = expert_P.bincount(minlength=len(self._mlps)).tolist()
        y_PH = torch.empty(len(order_P), x_TH.shape[1], dtype=x_TH.dtype)
        y_PH[order_P] = self._outputs(x_TH[order_P // num_chosen], counts)
        y_TKH = y_PH.view(num_rows, num_chosen, -1)
        sum_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
        for choice in range(num_chosen):
            sum_TH += y_TKH[:, choice].float() * weight_TK[:, choice, None]
        return sum_TH.to(x_TH.dtype)

    def _outputs(self, x_PH: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows in the order of experts, who have `counts` of them."""
        parts = zip(self._mlps, x_PH.split(counts), strict=True)
        return torch.cat([self._output(mlp, x_NH) for mlp, x_NH in parts if len(x_NH)])

    def _output(self, mlp: tuple[Linear, Linear], x_NH: torch.Tensor) -> torch.Tensor:
        gate_up, down = mlp
        return down(self._gate_mul(gate_up(x_NH), self._activation))
