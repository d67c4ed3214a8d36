"""A stage's slice of a llama-like decoder, run on a flat mixed batch.

Knows the maths and its weights' names; knows nothing of plans, sampling or other
stages. Shapes: T rows, H hidden, N query heads, M KV heads, D head size, R rows
that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from orca_kernels import AttentionBackend, AttentionContext

from orca_dist.models.layers import Linear, Rotary, Rotation, rms_norm, rotate, silu_mul
from orca_dist.models.rope import inverse_frequencies
from orca_dist.spec import ModelSpec

Weights = Mapping[str, torch.Tensor]


class KVCache(Protocol):
    """Keys and values of one layer, each [num_blocks, block_size, M, D]."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer; q/k/v and gate/up are fused."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Layers `layers` of the model, plus the embedding and head at its ends."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        layers: range,
        weights: Weights,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self._layers = {index: _layer(weights, f"layers.{index}.") for index in layers}
        self._embed = weights.get("embed")
        self._final_norm = weights.get("final_norm")
        self._lm_head = Linear(weights["lm_head"]) if "lm_head" in weights else None
        self._backend = backend
        self._rotary = Rotary(
            inverse_frequencies(spec.rope, spec.head_dim),
            max_len=spec.max_model_len,
            scale=spec.rope.attention_factor,
            dtype=dtype,
            device=device,
        )

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """First stage: [T] -> [T, H]."""
        assert self._embed is not None, "only the first stage holds the embedding"
        return self._embed[token_ids_T]

    def forward(
        self,
        x_TH: torch.Tensor,
        positions_T: torch.Tensor,
        cache: KVCache,
        context: AttentionContext,
        on_layer: Callable[[], object],
    ) -> torch.Tensor:
        """This stage's layers: [T, H] -> [T, H]. `on_layer` hears of each before it begins."""
        eps, rotation = self.spec.rms_norm_eps, self._rotary(positions_T)
        for index, layer in self._layers.items():
            on_layer()
            normed = rms_norm(x_TH, layer.input_norm, eps)
            x_TH = x_TH + self._attention(normed, layer, rotation, cache.layer(index), context)
            normed = rms_norm(x_TH, layer.post_norm, eps)
            x_TH = x_TH + layer.down(silu_mul(layer.gate_up(normed)))
        return x_TH

    def logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Last stage: the rows that sample, [R, H] -> fp32 [R, V]."""
        assert self._lm_head is not None, "only the last stage holds the head"
        assert self._final_norm is not None
        normed = rms_norm(x_RH, self._final_norm, self.spec.rms_norm_eps)
        return self._lm_head(normed).float()

    def _attention(
        self,
        x_TH: torch.Tensor,
        layer: LayerWeights,
        rotation: Rotation,
        cache: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
    ) -> torch.Tensor:
        spec = self.spec
        N, M, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q, k, v = layer.qkv(x_TH).split([N * D, M * D, M * D], dim=-1)
        q_TND = rotate(q.unflatten(-1, (N, D)), rotation)
        k_TMD = rotate(k.unflatten(-1, (M, D)), rotation)
        self._backend.write_kv(k_TMD, v.unflatten(-1, (M, D)), *cache, context)
        out_TND = self._backend.paged_attention(q_TND, *cache, context, D**-0.5)
        return layer.o(out_TND.flatten(1))


def _layer(weights: Weights, prefix: str) -> LayerWeights:
    return LayerWeights(
        input_norm=weights[prefix + "input_norm"],
        qkv=_fused(weights, prefix, "q", "k", "v"),
        o=_fused(weights, prefix, "o"),
        post_norm=weights[prefix + "post_norm"],
        gate_up=_fused(weights, prefix, "gate", "up"),
        down=_fused(weights, prefix, "down"),
    )


def _fused(weights: Weights, prefix: str, *names: str) -> Linear:
    """One matmul for several that share their input."""
    weight = torch.cat([weights[prefix + name] for name in names])
    has_bias = f"{prefix}{names[0]}_bias" in weights
    bias = torch.cat([weights[f"{prefix}{name}_bias"] for name in names]) if has_bias else None
    return Linear(weight, bias)
