"""What a layer does after its attention: an MLP with a gate, or a mixture of experts.

Shapes: T rows, H hidden, E experts, K experts of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from orca_kernels import Activation, Kernels, Linear, route
from orca_kernels import Experts as ExpertKernel

from orca_dist.models.layers import Weights, fused, joined
from orca_dist.spec import Experts, ModelSpec


class Mlp(Protocol):
    """[T, H] -> [T, H]. `nbytes`: of its weights, as they are kept."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """gate and up are one matmul."""

    kernels: Kernels
    gate_up: Linear
    down: Linear
    activation: Activation

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.down(self.kernels.gate_mul(self.gate_up(x_TH), self.activation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A router scores the experts for each row; the row goes through the best of them."""

    spec: Experts
    router: Linear
    experts: ExpertKernel

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + self.experts.nbytes

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        expert_TK, weight_TK = route(
            self.router(x_TH),
            self.spec.num_chosen,
            normalised=self.spec.normalised,
            rounded=self.spec.rounds_shares,
        )
        return self.experts(x_TH, expert_TK, weight_TK)


def make_mlp(spec: ModelSpec, weights: Weights, index: int, kernels: Kernels) -> Mlp:
    """That of layer `index`."""
    prefix, activation = f"layers.{index}.", Activation(spec.activation)
    experts = spec.experts_of(index)
    if experts is None:
        return GatedMlp(
            kernels=kernels,
            gate_up=fused(kernels, weights, prefix, "gate", "up"),
            down=fused(kernels, weights, prefix, "down"),
            activation=activation,
        )
    return Mixture(
        spec=experts,
        router=fused(kernels, weights, prefix, "router"),
        experts=kernels.experts(
            _matrices(weights, prefix, experts.num_experts), experts.num_experts, activation
        ),
    )


def _matrices(
    weights: Weights, prefix: str, num_experts: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One expert's after the other, read when it is asked for: gate and up as one, and down."""
    for number in range(num_experts):
        gate, up, down = (f"{prefix}experts.{number}.{name}" for name in ("gate", "up", "down"))
        yield joined([weights[gate], weights[up]]), weights[down]
