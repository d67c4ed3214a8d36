"""A model's shapes, from Hugging Face's config.json. What isn't supported is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_dist.errors import ModelError
from orca_dist.spec.checks import one_of, positive_int
from orca_dist.spec.rope import RopeSpec, parse_rope

SUPPORTED_MODEL_TYPES = ("llama",)
SUPPORTED_ACTIVATIONS = ("silu", "swish")
ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes in elements; `max_model_len` in tokens; `dtype` as the file says."""

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
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

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


def parse_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json document."""
    _refuse_unsupported(config)
    hidden = positive_int(config, "hidden_size")
    heads = positive_int(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    max_len = config.get("max_position_embeddings", 2048)
    return ModelSpec(
        model_type=config["model_type"],
        num_layers=positive_int(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=positive_int(config, "vocab_size"),
        max_model_len=max_len,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=parse_rope(config, head_dim=head_dim, max_len=max_len),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        attention_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """config.json's eos_token_id: absent, one id or a list of them."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    _refuse_other_inputs(config)
    one_of("model_type", config.get("model_type"), SUPPORTED_MODEL_TYPES)
    one_of("hidden_act", config.get("hidden_act", "silu"), SUPPORTED_ACTIVATIONS)
    _refuse_quantised(config)


def _refuse_other_inputs(config: Mapping[str, Any]) -> None:
    for key in ("vision_config", "audio_config"):
        if config.get(key):
            raise ModelError(
                f"config.json: {key}: models that take more than text can't be served; "
                "give the folder of a text model"
            )


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        if details := config.get(key):
            method = details.get("quant_method") if isinstance(details, Mapping) else details
            raise ModelError(
                f"config.json: {key} (method {method}): quantised checkpoints can't be loaded; "
                "give the model's unquantised one, of fp32, fp16 or bf16"
            )
