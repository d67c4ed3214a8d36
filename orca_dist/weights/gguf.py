"""Converts a llama-architecture GGUF file to a Hugging Face folder with bf16 weights.

Makes config.json of the metadata and says which tensors the model needs; `gguf_text`
rebuilds the tokenizer and `gguf_weights` writes the tensors. What can't be converted
faithfully is refused by name. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca_dist.errors import ModelError
from orca_dist.spec import ModelSpec, parse_spec
from orca_dist.weights.atomic import new_folder
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.gguf_rope import DIVISORS, rope_parameters
from orca_dist.weights.gguf_text import eos_token_ids, write_tokenizer
from orca_dist.weights.gguf_weights import MAX_SHARD_BYTES, SUPPORTED_TYPES, write_weights
from orca_dist.weights.names import gguf_tensors, model_tensors, tensor_shapes


def convert_gguf(src: Path, dst: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    """Writes `src` as the Hugging Face folder `dst`, whole or not at all; returns `dst`.

    More weights than `max_shard_bytes` go into several files with an index. Shows a bar
    on stderr. Raises ModelError for a file that is damaged or of another architecture, a
    tensor type that isn't supported, a target that is taken, or a full disk.
    """
    source = GgufFile(src)
    with new_folder(dst) as folder:
        write_model(source, folder, max_shard_bytes=max_shard_bytes)
    return dst


def write_model(source: GgufFile, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Config, tokenizer and weights of `source`, into an existing folder."""
    config = _config(source)
    spec = parse_spec(config)
    tensors = _tensors(source, spec)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _token_config(source))
    write_tokenizer(source, folder, max_model_len=spec.max_model_len)
    write_weights(source, spec, tensors, folder, max_shard_bytes=max_shard_bytes)


def _config(source: GgufFile) -> dict[str, Any]:
    _refuse_unsupported(source)
    heads = source.count("llama.attention.head_count")
    hidden = source.count("llama.embedding_length")
    head_dim = source.count("llama.attention.key_length", hidden // heads)
    max_len = source.count("llama.context_length")
    rope = rope_parameters(source, head_dim=head_dim, max_len=max_len)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": source.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": source.count("llama.feed_forward_length"),
        "num_hidden_layers": source.count("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.count("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_len,
        "rms_norm_eps": source.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,  # the older dialect
        "rope_parameters": rope,
        "attention_bias": _any_bias(source, "attn"),
        "mlp_bias": _any_bias(source, "ffn"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "dtype": "bfloat16",
        **_token_config(source),
    }


def _refuse_unsupported(source: GgufFile) -> None:
    _refuse_part(source)
    architecture = source.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{source.path}: architecture {architecture!r} is not supported; supported: llama"
        )
    if source.get("llama.expert_count", 0) > 0:
        raise ModelError(f"{source.path}: mixture-of-experts models are not supported")
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


def _any_bias(source: GgufFile, part: str) -> bool:
    pattern = re.compile(rf"blk\.\d+\.{part}_\w+\.bias")
    return any(pattern.fullmatch(name) for name in source.tensors)


def _token_config(source: GgufFile) -> dict[str, Any]:
    eos = eos_token_ids(source)
    ids = {
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in ids.items() if value is not None}


def _tensors(source: GgufFile, spec: ModelSpec) -> dict[str, str]:
    """Hugging Face's name -> GGUF's, of exactly the tensors that the model needs."""
    table = gguf_tensors(spec.num_layers)
    stored = {name: tensor for name, tensor in source.tensors.items() if name != DIVISORS}
    for name, tensor in stored.items():
        if name not in table:
            raise ModelError(f"{source.path}: the tensor {name} has no place in a llama model")
        if tensor.tensor_type not in SUPPORTED_TYPES:
            supported = ", ".join(kind.name for kind in SUPPORTED_TYPES)
            raise ModelError(
                f"{source.path}: the tensor {name} is {tensor.tensor_type.name}, "
                f"which is not supported; supported: {supported}"
            )
    by_hf = {table[name]: name for name in stored}
    shapes = tensor_shapes(spec, model_tensors(spec, by_hf))
    for hf, shape in shapes.items():
        _check_tensor(source, hf, by_hf.get(hf), shape)
    return {hf: by_hf[hf] for hf in shapes}


def _check_tensor(source: GgufFile, hf: str, name: str | None, shape: tuple[int, ...]) -> None:
    if name is None:
        raise ModelError(f"{source.path}: the tensor for {hf} is missing")
    if source.shape(name) != shape:
        raise ModelError(
            f"{source.path}: the tensor {name} has shape {list(source.shape(name))}, "
            f"its metadata makes it {list(shape)}"
        )


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
