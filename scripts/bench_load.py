"""How fast a checkpoint loads, as a share of how fast `dd` reads its files.

Writes a sharded model of about 2 GB once (any folder of a model does as well), then in turn,
round by round: dd and the loader with the files in the page cache, and both with them
dropped from it. The loader gives up each tensor before it reads the next, as a stage does that
packs it into another layout.

    python scripts/bench_load.py /tmp/load-model --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from orca_dist.spec import load_spec, parse_spec
from orca_dist.weights.checkpoint import Checkpoint
from orca_dist.weights.headers import INDEX_FILE
from orca_dist.weights.names import LM_HEAD, model_tensors, tensor_shapes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 21,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "dtype": "float16",
}
SHARD_BYTES = 450_000_000


def main() -> None:
    """Prints a table, and the medians' shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of a model; made where it doesn't exist")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        make_model(arguments.folder)
    report(measure(arguments.folder, arguments.rounds))


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """What was measured -> GB/s of each round."""
    shards = sorted(folder.glob("*.safetensors"))
    total_bytes = sum(path.stat().st_size for path in shards)
    ways: dict[str, Callable[[], object]] = {
        "dd": lambda: dd(shards),
        "loader": lambda: load(folder),
    }
    speeds: dict[str, list[float]] = {}
    dd(shards)
    for _ in range(rounds):
        for cached in (True, False):
            for name, way in ways.items():
                if not cached:
                    drop(shards)
                speeds.setdefault(f"{name}, {'cached' if cached else 'not cached'}", []).append(
                    total_bytes / 1e9 / seconds(way)
                )
        dd(shards)
    return speeds


def report(speeds: Mapping[str, list[float]]) -> None:
    """One line a way, then shares of medians."""
    for name, values in speeds.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:<28}{middle:6.2f} GB/s ({low:.2f}-{high:.2f})")
    for state in ("cached", "not cached"):
        ours, other = (statistics.median(speeds[f"{name}, {state}"]) for name in ("loader", "dd"))
        print(f"loader / dd, {state}: {ours / other:.0%}")


def seconds(way: Callable[[], object]) -> float:
    """How long it takes."""
    start_s = time.perf_counter()
    way()
    return time.perf_counter() - start_s


def dd(shards: list[Path]) -> None:
    """Reads each file into one small buffer."""
    for path in shards:
        command = ["dd", f"if={path}", f"of={os.devnull}", "bs=1M", "status=none"]
        subprocess.run(command, check=True)


def load(folder: Path) -> None:
    """Every tensor, as a pipeline of one stage would."""
    checkpoint = Checkpoint(folder)
    spec = load_spec(folder)
    dtype, device = getattr(torch, spec.dtype), torch.device("cpu")
    for name in model_tensors(spec, checkpoint.names()).values():
        checkpoint.tensor(name, dtype=dtype, device=device)


def drop(shards: list[Path]) -> None:
    """Out of the page cache; needs no rights."""
    for path in shards:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_model(folder: Path) -> None:
    """Shards of random values with an index, of CONFIG's shapes."""
    folder.mkdir(parents=True)
    spec = parse_spec(CONFIG)
    shapes = tensor_shapes(spec, model_tensors(spec, {LM_HEAD}))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_shards(shapes), 1):
        file = f"model-{number:05d}.safetensors"
        _save({name: shapes[name] for name in names}, folder / file, seed=number)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    room = SHARD_BYTES
    for name, shape in shapes.items():
        if names and room < _bytes(shape):
            yield names
            names, room = [], SHARD_BYTES
        names.append(name)
        room -= _bytes(shape)
    yield names


def _bytes(shape: tuple[int, ...]) -> int:
    return 2 * int(np.prod(shape))


def _save(shapes: Mapping[str, tuple[int, ...]], path: Path, *, seed: int) -> None:
    """fp16, which numpy has; the loader turns bits into numbers for neither type."""
    generator = np.random.default_rng(seed)
    tensors = {
        name: np.frombuffer(generator.bytes(_bytes(shape)), np.float16).reshape(shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, path)


if __name__ == "__main__":
    main()
