"""A stage's slice of a decoder of any family, run on a flat mixed batch.

Knows the maths and its weights' names; how families differ is in their specs. Knows
nothing of plans, sampling or other stages. Shapes: T rows, H hidden, N query heads,
M KV heads, D head size, R rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from orca_kernels import AttentionContext, Kernels, Linear, Rotation

from orca_dist.models.layers import Rotary, Weights, cap_logits, fused, rounded, scaled
from orca_dist.models.mlp import Mlp, make_mlp
from orca_dist.models.rope import inverse_frequencies
from orca_dist.spec import ModelSpec


class KVCache(Protocol):
    """Keys and values of one layer, each [num_blocks, block_size, M, D]."""

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer; q, k and v are fused. `window` in positions; None: it sees all.

    A norm is of what goes into attention or MLP, an out_norm of what comes out.
    """

    attention_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp
    mlp_out_norm: torch.Tensor | None
    window: int | None
    is_rotated: bool

    @property
    def held(self) -> tuple[Linear | Mlp | torch.Tensor | None, ...]:
        """All that takes memory."""
        norms = (self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm)
        return (*norms, self.q_norm, self.k_norm, self.qkv, self.o, self.mlp)


class Decoder:
    """Layers `layers` of the model, plus the embedding and head at its ends."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        layers: range,
        weights: Weights,
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        self._layers = {index: self._layer(weights, index) for index in layers}
        self._embed = weights.get("embed")
        self._final_norm = weights.get("final_norm")
        self._lm_head = kernels.linear(weights["lm_head"]) if "lm_head" in weights else None
        multiplier = spec.embedding_multiplier
        self._multiplier = rounded(multiplier, dtype) if spec.rounds_multiplier else multiplier
        self._rotary = Rotary(
            inverse_frequencies(spec.rope, spec.head_dim),
            max_len=spec.max_model_len,
            scale=spec.rope.attention_factor,
            dtype=torch.float32 if spec.rotates_wide else dtype,
            device=device,
        )

    @property
    def weight_bytes(self) -> int:
        """As they are held: matmuls may keep weights in fewer bytes than they compute in, and a
        tied head the embedding itself."""
        held = [None if self._is_tied else self._embed, self._final_norm, self._lm_head]
        held += [each for layer in self._layers.values() for each in layer.held]
        return sum(each.nbytes for each in held if each is not None)

    @property
    def _is_tied(self) -> bool:
        """One tensor is embedding and head."""
        embed, head = self._embed, self._lm_head
        return embed is not None and head is not None and head.keeps(embed)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """First stage: [T] -> [T, H]."""
        assert self._embed is not None, "only the first stage holds the embedding"
        return scaled(self._embed[token_ids_T], self._multiplier)

    def forward(
        self,
        x_TH: torch.Tensor,
        positions_T: torch.Tensor,
        cache: KVCache,
        context: AttentionContext,
        on_layer: Callable[[], object],
    ) -> torch.Tensor:
        """This stage's layers: [T, H] -> [T, H]. `on_layer` hears of each before it begins."""
        rotation = self._rotary(positions_T)
        y_TH = None
        for index, layer in self._layers.items():
            on_layer()
            x_TH, normed = self._before(x_TH, y_TH, layer.attention_norm)
            y_TH = self._attention(normed, layer, rotation, cache.layer(index), context)
            y_TH = self._after(y_TH, layer.attention_out_norm)
            x_TH, normed = self._before(x_TH, y_TH, layer.mlp_norm)
            y_TH = self._after(layer.mlp(normed), layer.mlp_out_norm)
        return x_TH if y_TH is None else x_TH + y_TH

    def logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Last stage: the rows that sample, [R, H] -> fp32 [R, V]."""
        assert self._lm_head is not None, "only the last stage holds the head"
        assert self._final_norm is not None
        logits_RV = self._lm_head(self._norm(x_RH, self._final_norm)).float()
        logits_RV = scaled(logits_RV, 1.0 / self.spec.logits_divisor)
        softcap = self.spec.logits_softcap
        return logits_RV if softcap is None else cap_logits(logits_RV, softcap)

    def _norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        return self._kernels.rms_norm(
            x_TH,
            weight_H,
            spec.rms_norm_eps,
            rounds_late=spec.rounds_late,
            adds_one=spec.norm_adds_one,
        )

    def _before(
        self, x_TH: torch.Tensor, y_TH: torch.Tensor | None, weight_H: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream, with what is still to be added; what goes into attention or MLP."""
        spec = self.spec
        if weight_H is None:
            x_TH = x_TH if y_TH is None else x_TH + y_TH
            return x_TH, x_TH
        if y_TH is None:
            return x_TH, self._norm(x_TH, weight_H)
        return self._kernels.add_rms_norm(
            x_TH,
            y_TH,
            weight_H,
            spec.rms_norm_eps,
            rounds_late=spec.rounds_late,
            adds_one=spec.norm_adds_one,
        )

    def _after(self, y_TH: torch.Tensor, weight_H: torch.Tensor | None) -> torch.Tensor:
        """What attention or MLP adds to its input."""
        y_TH = y_TH if weight_H is None else self._norm(y_TH, weight_H)
        return scaled(y_TH, self.spec.residual_multiplier)

    def _attention(
        self,
        x_TH: torch.Tensor,
        layer: Layer,
        rotation: Rotation,
        cache: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
    ) -> torch.Tensor:
        spec = self.spec
        N, M, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q, k, v = layer.qkv(x_TH).split([N * D, M * D, M * D], dim=-1)
        q_TND = self._heads_normed(q, layer.q_norm).view(-1, N, D)
        k_TMD = self._heads_normed(k, layer.k_norm).view(-1, M, D)
        v_TMD = v.unflatten(-1, (M, D))
        rotated = rotation if layer.is_rotated else None
        q_TND = self._kernels.rotate_and_write(q_TND, k_TMD, v_TMD, rotated, *cache, context)
        out_TND = self._kernels.paged_attention(
            q_TND,
            *cache,
            context,
            spec.attention_scale,
            layer.window,
            spec.attention_softcap,
        )
        return layer.o(out_TND.flatten(1))

    def _heads_normed(self, x_TF: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Over as much of a row at a time as the weight is long: one head, or all of them."""
        if weight is None:
            return x_TF
        return self._norm(x_TF.unflatten(-1, (-1, len(weight))), weight)

    def _layer(self, weights: Weights, index: int) -> Layer:
        spec, kernels = self.spec, self._kernels
        prefix = f"layers.{index}."
        return Layer(
            attention_norm=weights.get(prefix + "attention_norm"),
            qkv=fused(kernels, weights, prefix, "q", "k", "v"),
            q_norm=weights.get(prefix + "q_norm"),
            k_norm=weights.get(prefix + "k_norm"),
            o=fused(kernels, weights, prefix, "o"),
            attention_out_norm=weights.get(prefix + "attention_out_norm"),
            mlp_norm=weights.get(prefix + "mlp_norm"),
            mlp=make_mlp(spec, weights, index, kernels),
            mlp_out_norm=weights.get(prefix + "mlp_out_norm"),
            window=spec.window(index),
            is_rotated=spec.is_rotated(index),
        )
