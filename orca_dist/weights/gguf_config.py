"""What the metadata of a GGUF file says of its model, as a config.json.

Three architectures, whose keys differ by their prefix alone. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orca_dist.errors import ModelError
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.gguf_rope import rope_parameters
from orca_dist.weights.gguf_text import eos_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A GGUF architecture that is a family of ours, of the same name.

    `pairs_rows`: rows of q and k lie with the two halves of each rotary pair side by side.
    `optional_biases`: config.json's keys that say whether there are any -> what their tensors'
    names begin with.
    """

    hf_class: str
    pairs_rows: bool
    optional_biases: Mapping[str, str]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        hf_class="LlamaForCausalLM",
        pairs_rows=True,
        optional_biases={"attention_bias": "attn", "mlp_bias": "ffn"},
    ),
    "qwen2": Architecture(hf_class="Qwen2ForCausalLM", pairs_rows=False, optional_biases={}),
    "qwen3": Architecture(
        hf_class="Qwen3ForCausalLM", pairs_rows=False, optional_biases={"attention_bias": "attn"}
    ),
}


def model_config(source: GgufFile) -> dict[str, Any]:
    """Raises ModelError for an architecture, or a feature of it, that isn't supported."""
    _refuse_unsupported(source)
    name = source.architecture
    heads = source.count(f"{name}.attention.head_count")
    hidden = source.count(f"{name}.embedding_length")
    head_dim = source.count(f"{name}.attention.key_length", hidden // heads)
    max_len = source.count(f"{name}.context_length")
    rope = rope_parameters(source, head_dim=head_dim, max_len=max_len)
    return {
        "architectures": [ARCHITECTURES[name].hf_class],
        "model_type": name,
        "vocab_size": source.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": source.count(f"{name}.feed_forward_length"),
        "num_hidden_layers": source.count(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.count(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_len,
        "rms_norm_eps": source.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,  # the older dialect
        "rope_parameters": rope,
        **_biases(source),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "dtype": "bfloat16",
        **token_config(source),
    }


def token_config(source: GgufFile) -> dict[str, Any]:
    """The ids that generation_config.json names, too."""
    eos = eos_token_ids(source)
    ids = {
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _refuse_unsupported(source: GgufFile) -> None:
    _refuse_part(source)
    name = source.architecture
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{source.path}: architecture {name!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if source.get(f"{name}.expert_count", 0) > 0:
        raise ModelError(
            f"{source.path}: mixture-of-experts models can't be converted; give the model's "
            "Hugging Face folder"
        )
    if "token_embd.weight" not in source.tensors:
        raise ModelError(f"{source.path}: the tensor token_embd.weight is missing")


def _refuse_part(source: GgufFile) -> None:
    """Parts but the first hold little metadata, so this is the first question to ask."""
    num_parts = source.get("split.count", 0)
    if num_parts > 1:
        raise ModelError(
            f"{source.path} is part {source.get('split.no', 0) + 1} of {num_parts} of one model: "
            "merge them (llama.cpp's `llama-gguf-split --merge FIRST_PART MERGED.gguf`) and "
            "convert the merged file"
        )


def _biases(source: GgufFile) -> dict[str, bool]:
    optional = ARCHITECTURES[source.architecture].optional_biases
    return {key: _any_bias(source, part) for key, part in optional.items()}


def _any_bias(source: GgufFile, part: str) -> bool:
    pattern = re.compile(rf"blk\.\d+\.{part}_\w+\.bias")
    return any(pattern.fullmatch(name) for name in source.tensors)
