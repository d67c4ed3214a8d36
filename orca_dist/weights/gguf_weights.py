"""The tensors of a GGUF file as bf16 safetensors: one file, or shards with an index.

Goes tensor by tensor and a few rows at a time, so that memory holds about one tensor
however large the model is. Some files keep the rows of q and k in another order (rotary
pairs side by side); that is undone. Knows no metadata; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize

from orca_dist.spec import ModelSpec
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.headers import INDEX_FILE, SINGLE_FILE
from orca_dist.weights.progress import byte_progress

MAX_SHARD_BYTES = 5_000_000_000
SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16"),
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q4_K", "Q5_K", "Q6_K"),
    )
)
_CHUNK_ELEMENTS = 4 << 20
_BF16_BYTES = 2
_HEADER_ALIGNMENT = 8

Permuted = Callable[[np.ndarray], np.ndarray]
Order = Callable[[str], Permuted]  # of the tensor of a Hugging Face name
Shapes = Mapping[str, tuple[int, ...]]


def write_weights(
    source: GgufFile,
    spec: ModelSpec,
    tensors: Mapping[str, str],
    folder: Path,
    *,
    pairs_rows: bool,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """`tensors` is Hugging Face's name -> GGUF's. A shard holds `max_shard_bytes` or one tensor.

    Raises OSError where the disk refuses; the caller removes what is there by then.
    """
    shapes = {hf: source.shape(name) for hf, name in tensors.items()}
    shards = _shards(shapes, max_shard_bytes)
    order = partial(_halves_first, spec=spec) if pairs_rows else _as_they_are
    with byte_progress("converting", _num_bytes(shapes)) as advance:
        for file_name, names in shards.items():
            header = _safetensors_header({name: shapes[name] for name in names})
            content = _contents(source, order, {name: tensors[name] for name in names})
            _write_file(folder / file_name, header, content, advance)
    if len(shards) > 1:
        _write_index(folder / INDEX_FILE, shards, _num_bytes(shapes))


def _write_file(
    path: Path, header: bytes, content: Iterable[bytes], advance: Callable[[int], None]
) -> None:
    with path.open("wb") as file:
        file.write(header)
        for chunk in content:
            advance(file.write(chunk))


def _contents(source: GgufFile, order: Order, tensors: Mapping[str, str]) -> Iterator[bytes]:
    for hf, name in tensors.items():
        yield from _bf16_chunks(source, name, order(hf))


def _num_bytes(shapes: Shapes) -> int:
    return _BF16_BYTES * sum(prod(shape) for shape in shapes.values())


def _shards(shapes: Shapes, max_shard_bytes: int) -> dict[str, list[str]]:
    """File name -> the tensors in it, in the order of `shapes`."""
    groups: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, shape in shapes.items():
        num_bytes = _BF16_BYTES * prod(shape)
        if num_bytes > room and groups[-1]:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= num_bytes
    return dict(zip(_file_names(len(groups)), groups, strict=True))


def _file_names(num_shards: int) -> Sequence[str]:
    if num_shards == 1:
        return [SINGLE_FILE]
    return [f"model-{i:05d}-of-{num_shards:05d}.safetensors" for i in range(1, num_shards + 1)]


def _write_index(path: Path, shards: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    weight_map = {name: file_name for file_name, names in shards.items() for name in names}
    document = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _safetensors_header(shapes: Shapes) -> bytes:
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + _BF16_BYTES * prod(shape)
        document[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(document).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _bf16_chunks(source: GgufFile, name: str, permuted: Permuted) -> Iterator[bytes]:
    """The tensor's bf16 bytes, some rows at a time."""
    tensor = source.tensors[name]
    rows = permuted(tensor.data)
    step = max(1, _CHUNK_ELEMENTS * len(rows) // int(tensor.n_elements))
    for start in range(0, len(rows), step):
        wide = dequantize(rows[start : start + step], tensor.tensor_type)
        yield quantize(np.ascontiguousarray(wide), GGMLQuantizationType.BF16).tobytes()


def _as_they_are(hf: str) -> Permuted:
    return lambda rows: rows


def _halves_first(hf: str, *, spec: ModelSpec) -> Permuted:
    """Undoes the order of rotary pairs; quantised rows move whole, so before dequantising."""
    if ".q_proj." in hf:
        return lambda rows: _halves_apart(rows, spec.num_heads)
    if ".k_proj." in hf:
        return lambda rows: _halves_apart(rows, spec.num_kv_heads)
    return _as_they_are(hf)


def _halves_apart(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Per head: rows a0 b0 a1 b1 ... to a0 a1 ... b0 b1 ..."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)
