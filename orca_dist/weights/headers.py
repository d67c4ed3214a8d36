"""What a checkpoint folder holds, read from its index and its shards' headers alone.

The index is the only truth; files that it doesn't name are ignored. Finds every
missing, cut, damaged or littered file before anything serves, also for layers that
another stage will load. Imports no torch and reads no tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from orca_dist.errors import ModelError
from orca_dist.spec import ModelSpec, refuse_adapter
from orca_dist.weights.names import model_tensors, tensor_shapes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

_FILE_NAME = re.compile(r"[^/\\\x00]+\.safetensors")  # of the folder itself: no way out of it
_SHARD_NAME = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor as its shard describes it.

    `dtype` is in the format's spelling, e.g. BF16; `num_bytes` is 0 for one that can't be loaded.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


Headers = Mapping[str, TensorHeader]


def tensor_names(folder: Path) -> frozenset[str]:
    """Hugging Face's names of all tensors, from the index alone where there is one."""
    if (folder / INDEX_FILE).exists():
        return frozenset(read_weight_map(folder / INDEX_FILE))
    return frozenset(read_headers(folder))


def read_headers(folder: Path, names: Collection[str] | None = None) -> Headers:
    """Hugging Face's name -> header; raises ModelError naming the bad file.

    Of every tensor; or of `names` at least: where there is an index, shards that hold none
    of these are not opened and need not be there.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: give a Hugging Face model folder")
    refuse_adapter(folder)
    if (folder / INDEX_FILE).exists():
        weight_map = read_weight_map(folder / INDEX_FILE)
        kept = weight_map.keys() if names is None else weight_map.keys() & set(names)
        return _indexed(folder, {name: weight_map[name] for name in kept})
    if (folder / SINGLE_FILE).exists():
        return read_shard(folder / SINGLE_FILE)
    return _merged(folder, _unindexed_shards(folder))


def check_headers(headers: Headers, spec: ModelSpec) -> None:
    """Raises ModelError unless every tensor of the whole model is there in its right shape."""
    check_tensors(headers, spec, model_tensors(spec, headers))


def check_tensors(headers: Headers, spec: ModelSpec, names: Mapping[str, str]) -> None:
    """As check_headers, of the tensors of `names` (ours -> Hugging Face's)."""
    for name, shape in tensor_shapes(spec, names).items():
        header = headers.get(name)
        if header is None:
            raise ModelError(
                f"{name} is missing from the checkpoint: its files hold other weights than "
                "config.json describes; download the model again"
            )
        _check_tensor(name, header, shape)


def check_folder(folder: Path, spec: ModelSpec) -> Headers:
    """Both of the above; what a driver runs before it starts any stage."""
    headers = read_headers(folder)
    check_headers(headers, spec)
    return headers


def read_shard(path: Path) -> dict[str, TensorHeader]:
    """The header of one safetensors file, whose size must be what the header promises."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: _tensor(path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(
            f"{path} is cut short or damaged ({path.stat().st_size} bytes; {error}): "
            "download it again"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error}") from None


def _indexed(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorHeader]:
    shards = {name: _listed_shard(folder, name) for name in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(
                f"{name} is not in {folder / shard}, though {INDEX_FILE} says so: "
                "the files are of different checkpoints; download the model again"
            )
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor -> shard, of an index file; raises ModelError where it is damaged."""
    document = read_json(path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map: download it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _FILE_NAME.fullmatch(shard):
            raise ModelError(
                f"{path}: {shard!r} is not the name of a safetensors file of this folder"
            )
    return weight_map


def _listed_shard(folder: Path, name: str) -> dict[str, TensorHeader]:
    if not (folder / name).exists():
        raise ModelError(
            f"{folder / name} is missing, though {INDEX_FILE} names it: download it again"
        )
    return read_shard(folder / name)


def _unindexed_shards(folder: Path) -> list[Path]:
    """The numbered shards of a folder without an index; all of them must be there."""
    found = {path.name: path for path in folder.iterdir() if _SHARD_NAME.fullmatch(path.name)}
    if not found:
        raise ModelError(_no_weights(folder))
    totals = {name.rsplit("-", 1)[1].removesuffix(".safetensors") for name in found}
    if len(totals) > 1:
        raise ModelError(f"{folder} mixes shards of several checkpoints and has no {INDEX_FILE}")
    total = totals.pop()
    names = [f"model-{i:0{len(total)}d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
    for name in names:
        if name not in found:
            raise ModelError(f"{folder / name} is missing: download it again")
    return [found[name] for name in names]


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return (
            f"{folder} has PyTorch pickles only, which can run any code when opened: fetch the "
            "model's safetensors, or, if you trust the files, convert them (transformers: "
            "from_pretrained, then save_pretrained)"
        )
    if any(folder.glob("*.gguf")):
        return f"{folder} has a GGUF file only: convert it with `orca-dist model convert`"
    return f"{folder} holds no weights: needs {SINGLE_FILE}, or shards with {INDEX_FILE}"


def _merged(folder: Path, paths: Iterable[Path]) -> dict[str, TensorHeader]:
    merged: dict[str, TensorHeader] = {}
    for path in paths:
        for name, header in read_shard(path).items():
            if name in merged:
                raise ModelError(
                    f"{name} is in both {merged[name].shard} and {path.name} of {folder}, "
                    f"and no {INDEX_FILE} says which counts"
                )
            merged[name] = header
    return merged


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ModelError naming it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} is not a JSON object: download it again")
    return document


def make_header(shard: str, dtype: str, shape: tuple[int, ...]) -> TensorHeader:
    """A header of a tensor in the format's spelling of its dtype."""
    num_bytes = prod(shape) * ITEM_BYTES.get(dtype, 0)
    return TensorHeader(shard=shard, dtype=dtype, shape=shape, num_bytes=num_bytes)


def _tensor(path: Path, view: Any) -> TensorHeader:
    return make_header(path.name, view.get_dtype(), tuple(view.get_shape()))


def _check_tensor(name: str, header: TensorHeader, shape: tuple[int, ...]) -> None:
    if header.dtype not in ITEM_BYTES:
        raise ModelError(
            f"{name} in {header.shard} is {header.dtype}, which can't be loaded; "
            f"supported: {', '.join(ITEM_BYTES)}"
        )
    if header.shape != shape:
        raise ModelError(
            f"{name} in {header.shard} has shape {list(header.shape)}, "
            f"but config.json makes it {list(shape)}"
        )
