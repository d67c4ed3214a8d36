"""Converts a GGUF file of a known architecture to a Hugging Face folder with bf16 weights.

Says which tensors the model needs; `gguf_config` reads the metadata, `gguf_text` rebuilds the
tokenizer and `gguf_weights` writes the tensors. What can't be converted faithfully is refused
by name. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orca_dist.errors import ModelError
from orca_dist.spec import ModelSpec, parse_spec
from orca_dist.weights.atomic import new_folder
from orca_dist.weights.gguf_config import ARCHITECTURES, model_config, token_config
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.gguf_rope import DIVISORS
from orca_dist.weights.gguf_text import write_tokenizer
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
    config = model_config(source)
    spec = parse_spec(config)
    tensors = _tensors(source, spec)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", token_config(source))
    write_tokenizer(source, folder, max_model_len=spec.max_model_len)
    write_weights(
        source,
        spec,
        tensors,
        folder,
        pairs_rows=ARCHITECTURES[source.architecture].pairs_rows,
        max_shard_bytes=max_shard_bytes,
    )


def _tensors(source: GgufFile, spec: ModelSpec) -> dict[str, str]:
    """Hugging Face's name -> GGUF's, of exactly the tensors that the model needs."""
    table = gguf_tensors(spec.num_layers)
    stored = {name: tensor for name, tensor in source.tensors.items() if name != DIVISORS}
    by_hf = {table.get(name, name): name for name in stored}
    shapes = tensor_shapes(spec, model_tensors(spec, by_hf))
    for hf, name in by_hf.items():
        if hf not in shapes:
            raise ModelError(
                f"{source.path}: the tensor {name} has no place in a {spec.model_type} model"
            )
        _check_type(source, name)
    for hf, shape in shapes.items():
        _check_tensor(source, hf, by_hf.get(hf), shape)
    return {hf: by_hf[hf] for hf in shapes}


def _check_type(source: GgufFile, name: str) -> None:
    kind = source.tensors[name].tensor_type
    if kind not in SUPPORTED_TYPES:
        raise ModelError(
            f"{source.path}: the tensor {name} is {kind.name}, which is not supported; "
            f"supported: {', '.join(kind.name for kind in SUPPORTED_TYPES)}"
        )


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
