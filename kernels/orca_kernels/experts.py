"""A mixture of experts: each row goes through the few MLPs that its router chose.

Shapes: T rows, H hidden, E experts, F the width of one, K experts of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from orca_kernels.activation import Activation
from orca_kernels.reference import gate_mul

if TYPE_CHECKING:
    from orca_kernels.dispatch import Experts

Matrices = tuple[torch.Tensor, torch.Tensor]  # of an expert: gate and up [2F, H], down [H, F]


def route(
    scores_TE: torch.Tensor, num_chosen: int, *, normalised: bool, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each row and their weights: [T, K] int64, [T, K] float32.

    Weights are of the softmax over all experts; normalised: of that over the chosen ones. rounded:
    to what the scores' type holds.
    """
    weight_TE = scores_TE.float().softmax(-1)
    weight_TK, expert_TK = weight_TE.topk(num_chosen, dim=-1)
    if normalised:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return expert_TK, weight_TK.to(scores_TE.dtype).float() if rounded else weight_TK


def experts(
    x_TH: torch.Tensor,
    expert_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    down_EHF: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """Sum of weight * down(gate_mul(gate_up x)) over a row's experts, added up in fp32: [T, H].

    gate_up [E, 2F, H], down [E, H, F]. Every expert computes every row here, E / K times what
    is needed: no shape depends on the router, and the host reads nothing.
    """
    sum_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
    for index, (gate_up_FH, down_HF) in enumerate(zip(gate_up_EFH, down_EHF, strict=True)):
        y_TH = linear(gate_mul(linear(x_TH, gate_up_FH), activation), down_HF)
        is_chosen_TK = expert_TK == index
        share_T1 = (weight_TK * is_chosen_TK).sum(-1, keepdim=True)
        sum_TH += torch.where(is_chosen_TK.any(-1, keepdim=True), share_T1 * y_TH.float(), 0.0)
    return sum_TH.to(x_TH.dtype)


class TorchExperts:
    """`experts` with the weights that it takes."""

    def __init__(
        self, gate_up_EFH: torch.Tensor, down_EHF: torch.Tensor, activation: Activation
    ) -> None:
        self.gate_up_EFH = gate_up_EFH
        self.down_EHF = down_EHF
        self.activation = activation

    @property
    def nbytes(self) -> int:
        return self.gate_up_EFH.nbytes + self.down_EHF.nbytes

    def __call__(
        self, x_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        weights = (self.gate_up_EFH, self.down_EHF)
        return experts(x_TH, expert_TK, weight_TK, *weights, self.activation)


def of_stacks(
    make: Callable[[torch.Tensor, torch.Tensor, Activation], Experts],
    matrices: Iterable[Matrices],
    num_experts: int,
    activation: Activation,
) -> Experts:
    """`make`, which wants the matrices of all experts in two tensors, as a MakeExperts.

    One expert's are beside them at a time, so `matrices` should make them as they are asked for.
    """
    return make(*_stacked(matrices, num_experts), activation)


def _stacked(matrices: Iterable[Matrices], num_experts: int) -> Matrices:
    stacks: list[torch.Tensor] = []
    for number, pair in enumerate(matrices):
        stacks = stacks or [each.new_empty(num_experts, *each.shape) for each in pair]
        for stack, each in zip(stacks, pair, strict=True):
            stack[number] = each
    gate_up_EFH, down_EHF = stacks
    return gate_up_EFH, down_EHF
