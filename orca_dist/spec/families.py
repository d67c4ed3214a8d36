"""The model families, as data: what of config.json each reads, and what it does by itself.

All run on one decoder. A family's `keys` are those that count for it, with the values that
transformers takes where a file leaves them out; others are without effect in its
config.json. Rules that depend on a layer speak of its index in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Keys = Mapping[str, Any]

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")


class QkNorm(StrEnum):
    """How queries and keys are normalised before rotation: each head, or all of them at once."""

    NONE = "none"
    HEAD = "head"
    FULL = "full"


class NormPlacement(StrEnum):
    """Where attention and MLP are normalised: what goes in, what comes out, or both."""

    BEFORE = "before"
    AFTER = "after"
    BOTH = "both"


class Activation(StrEnum):
    """What the MLP's gate goes through, by the kernels' own names."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class Windows(StrEnum):
    """Which layers see a window of the last positions only, where the file has a window at all."""

    ALL = "all"
    UPPER = "upper"  # those from max_window_layers on
    UNROTATED = "unrotated"  # those without rotary embedding
    EVEN = "even"  # every other one, from the first on


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`biases` name the projections that always have one. `activation` is (key, value if left out).

    `rounds_late`: norms are weighted in fp32, and only then rounded. `norm_adds_one`: it is a
    norm's weight + 1 that is multiplied by. `rotates_wide`: heads are rotated in fp32, and only
    then rounded. `embeds_by_root`: embeddings are multiplied by the root of the hidden size,
    rounded to the type that the model runs in. `rounds_shares`: see Experts.
    """

    keys: Keys = field(default_factory=dict)
    rope_theta: float = 10000.0
    activation: tuple[str, str] = ("hidden_act", "silu")
    biases: tuple[str, ...] = ()
    qk_norm: QkNorm = QkNorm.NONE
    norms: NormPlacement = NormPlacement.BEFORE
    windows: Windows = Windows.ALL
    rounds_late: bool = False
    norm_adds_one: bool = False
    rotates_wide: bool = False
    embeds_by_root: bool = False
    rounds_shares: bool = False

    def read(self, config: Keys) -> dict[str, Any]:
        """Every key that any family may read, with the value that it has for this one."""
        known = {**_COMMON, **self.keys}
        return {**_WITHOUT, **{key: config.get(key, known[key]) for key in known}}


_COMMON: Keys = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_WITHOUT: Keys = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "sliding_window": None,
    "max_window_layers": 0,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "num_local_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_BIASES: Keys = {"attention_bias": False, "mlp_bias": False}
_QWEN: Keys = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(keys=_BIASES),
    "mistral": Family(
        keys={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        }
    ),
    "qwen2": Family(keys=_QWEN, biases=("q", "k", "v"), windows=Windows.UPPER),
    "qwen3": Family(
        keys={**_QWEN, "head_dim": 128, "attention_bias": False},
        qk_norm=QkNorm.HEAD,
        windows=Windows.UPPER,
    ),
    "smollm3": Family(
        keys={
            **_BIASES,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        rope_theta=2000000.0,
        windows=Windows.UNROTATED,
    ),
    "granite": Family(
        keys={
            **_BIASES,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        }
    ),
    "olmo2": Family(
        keys={"attention_bias": False, "rms_norm_eps": 1e-5},
        qk_norm=QkNorm.FULL,
        norms=NormPlacement.AFTER,
        rounds_late=True,
        rotates_wide=True,
    ),
    "gemma2": Family(
        keys={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": None,
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms=NormPlacement.BOTH,
        windows=Windows.EVEN,
        rounds_late=True,
        norm_adds_one=True,
        embeds_by_root=True,
    ),
    "mixtral": Family(
        keys={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        rope_theta=1000000.0,
    ),
    "qwen3_moe": Family(
        keys={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        qk_norm=QkNorm.HEAD,
        rounds_shares=True,
    ),
}
