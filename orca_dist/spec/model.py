"""A model's shapes, from Hugging Face's config.json. What isn't supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from orca_dist.errors import ModelError
from orca_dist.spec.checks import (
    one_of,
    positive,
    positive_int,
    positive_int_or,
    positive_or_none,
)
from orca_dist.spec.experts import Experts, read_experts
from orca_dist.spec.families import (
    ATTENTION,
    FAMILIES,
    MLP,
    Activation,
    Family,
    Keys,
    NormPlacement,
    QkNorm,
)
from orca_dist.spec.layers import sliding_layers, unrotated_layers
from orca_dist.spec.rope import RopeSpec, parse_rope

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes in elements; `max_model_len` and `sliding_window` in tokens; `dtype` as the file says.

    `biases` name the projections that have one. Layers are named by their index in the
    whole model: `sliding_layers` see the last `sliding_window` positions only, and
    `unrotated_layers` have no rotary embedding. A softcap bounds scores or logits to
    cap * tanh(x / cap); None: there is none. `rounds_multiplier`: the embedding's is rounded to the
    type that the model runs in. `rounds_late` and those below it: see Family. `experts`: None where
    every layer has an MLP.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    attention_scale: float
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    activation: Activation = Activation.SILU
    biases: tuple[str, ...] = ()
    qk_norm: QkNorm = QkNorm.NONE
    norms: NormPlacement = NormPlacement.BEFORE
    rounds_late: bool = False
    norm_adds_one: bool = False
    rotates_wide: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    experts: Experts | None = None

    def window(self, layer: int) -> int | None:
        """How many positions a layer sees, a row's own among them; None: all."""
        return self.sliding_window if layer in self.sliding_layers else None

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer's queries and keys get the rotary embedding."""
        return layer not in self.unrotated_layers

    def experts_of(self, layer: int) -> Experts | None:
        """What a layer has in place of an MLP; None: it has one."""
        return self.experts if self.experts and layer in self.experts.layers else None

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def load_spec(folder: Path) -> ModelSpec:
    """Reads `folder`/config.json; raises ModelError naming the file and what is wrong."""
    refuse_adapter(folder)
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: {_instead(folder)}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} is not a JSON object: download it again")
    return parse_spec(document)


def refuse_adapter(folder: Path) -> None:
    """Raises ModelError for a LoRA adapter: it is nothing without its base model."""
    if (folder / ADAPTER_FILE).exists():
        raise ModelError(
            f"{folder} holds a LoRA adapter ({ADAPTER_FILE}): merge it into its base model first "
            "(peft: merge_and_unload, then save_pretrained) and give that folder"
        )


def _instead(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return "the folder has a GGUF file; convert it with `orca-dist model convert`"
    return "give a Hugging Face model folder"


def parse_spec(config: Keys) -> ModelSpec:
    """The spec of a config.json document."""
    _refuse_unsupported(config)
    family = FAMILIES[config["model_type"]]
    keys = family.read(config)
    _refuse_bidirectional(keys)
    heads, head_dim = _heads(config, keys)
    hidden_size = positive_int(config, "hidden_size")
    num_layers = positive_int(config, "num_hidden_layers")
    max_len = positive_int(keys, "max_position_embeddings")
    unrotated = unrotated_layers(keys, num_layers)
    return ModelSpec(
        model_type=config["model_type"],
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_kv_heads(keys, heads),
        head_dim=head_dim,
        vocab_size=positive_int(config, "vocab_size"),
        max_model_len=max_len,
        rms_norm_eps=positive(keys, "rms_norm_eps"),
        rope=parse_rope(config, head_dim=head_dim, max_len=max_len, theta=family.rope_theta),
        tie_word_embeddings=bool(keys["tie_word_embeddings"]),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        attention_scale=_attention_scale(family, keys, head_dim),
        attention_softcap=positive_or_none(keys, "attn_logit_softcapping"),
        logits_softcap=positive_or_none(keys, "final_logit_softcapping"),
        activation=_activation(config, family),
        biases=_biases(family, keys),
        qk_norm=family.qk_norm,
        norms=family.norms,
        rounds_late=family.rounds_late,
        norm_adds_one=family.norm_adds_one,
        rotates_wide=family.rotates_wide,
        sliding_window=_window(keys),
        sliding_layers=sliding_layers(
            keys, config.get("layer_types"), num_layers, family.windows, unrotated
        ),
        unrotated_layers=unrotated,
        embedding_multiplier=_embedding_multiplier(family, keys, hidden_size),
        rounds_multiplier=family.embeds_by_root,
        residual_multiplier=positive(keys, "residual_multiplier"),
        logits_divisor=positive(keys, "logits_scaling"),
        experts=read_experts(config, keys, family, num_layers),
    )


def _heads(config: Keys, keys: Keys) -> tuple[int, int]:
    """How many query heads there are, and the size of one."""
    heads = positive_int(config, "num_attention_heads")
    share = max(1, positive_int(config, "hidden_size") // heads)
    return heads, positive_int_or(keys, "head_dim", share)


def _kv_heads(keys: Keys, heads: int) -> int:
    kv_heads = positive_int_or(keys, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads = {kv_heads} must divide "
            f"num_attention_heads = {heads}"
        )
    return kv_heads


def _attention_scale(family: Family, keys: Keys, head_dim: int) -> float:
    if "query_pre_attn_scalar" in family.keys:
        return float(positive(keys, "query_pre_attn_scalar") ** -0.5)
    if keys["attention_multiplier"] is None:
        return float(head_dim**-0.5)
    return positive(keys, "attention_multiplier")


def _embedding_multiplier(family: Family, keys: Keys, hidden_size: int) -> float:
    return sqrt(hidden_size) if family.embeds_by_root else positive(keys, "embedding_multiplier")


def _activation(config: Keys, family: Family) -> Activation:
    key, otherwise = family.activation
    name = config.get(key, otherwise)
    one_of(key, name, ACTIVATIONS)
    return ACTIVATIONS[name]


def _biases(family: Family, keys: Keys) -> tuple[str, ...]:
    optional = {"attention_bias": ATTENTION, "mlp_bias": MLP}
    chosen = [names for key, names in optional.items() if keys[key]]
    return sum(chosen, family.biases)


def _window(keys: Keys) -> int | None:
    if keys["sliding_window"] is None or not keys["use_sliding_window"]:
        return None
    return positive_int(keys, "sliding_window")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """config.json's eos_token_id: absent, one id or a list of them."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _refuse_unsupported(config: Keys) -> None:
    _refuse_other_inputs(config)
    one_of("model_type", config.get("model_type"), FAMILIES)
    _refuse_quantised(config)


def _refuse_other_inputs(config: Keys) -> None:
    for key in ("vision_config", "audio_config"):
        if config.get(key):
            raise ModelError(
                f"config.json: {key}: models that take more than text can't be served; "
                "give the folder of a text model"
            )


def _refuse_bidirectional(keys: Keys) -> None:
    key = "use_bidirectional_attention"
    if keys[key]:
        raise ModelError(
            f"config.json: {key} = {keys[key]!r} is not supported: needs a model whose tokens see "
            "only what comes before them"
        )


def _refuse_quantised(config: Keys) -> None:
    for key in ("quantization_config", "compression_config"):
        if details := config.get(key):
            method = details.get("quant_method") if isinstance(details, Mapping) else details
            raise ModelError(
                f"config.json: {key} (method {method}): quantised checkpoints can't be loaded; "
                "give the model's unquantised one, of fp32, fp16 or bf16"
            )
