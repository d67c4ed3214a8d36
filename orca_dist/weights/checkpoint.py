"""Reads chosen tensors of a checkpoint folder onto a device; the torch end of `headers`.

A stage opens only the shards that hold its tensors and reads only those bytes.
Knows Hugging Face's names only; `names` says which of them a stage needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from orca_dist.errors import ModelError
from orca_dist.spec import ModelSpec
from orca_dist.weights.headers import Headers, check_headers, read_headers

Progress = Callable[[int], None]


class Checkpoint:
    """A folder of safetensors; opening it verifies the shards it will read. Not thread-safe.

    bytes_read: of tensors, as stored.
    """

    def __init__(self, folder: Path, names: Collection[str] | None = None) -> None:
        """Of all tensors, or of `names` alone, whose shards are then all that is opened.

        Raises ModelError naming the file that is missing, cut or damaged.
        """
        self.folder = folder
        self.headers: Headers = read_headers(folder, names)
        self.bytes_read = 0

    def names(self) -> frozenset[str]:
        """Hugging Face's names of all tensors in the checkpoint."""
        return frozenset(self.headers)

    def check(self, spec: ModelSpec) -> None:
        """Raises ModelError unless every tensor of the whole model is there in its right shape."""
        check_headers(self.headers, spec)

    def read(
        self,
        names: Iterable[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors of `names`, by name, as owned copies of `dtype` on `device`.

        Each is read once even if named twice. `progress` is told the bytes of each
        tensor as it arrives. Raises ModelError naming a tensor or file that isn't there.
        """
        tensors: dict[str, torch.Tensor] = {}
        for shard, shard_names in self._by_shard(names).items():
            for name, tensor in self._read_shard(shard, shard_names):
                tensors[name] = tensor.to(device=device, dtype=dtype, copy=True)
                self.bytes_read += self.headers[name].num_bytes
                if progress:
                    progress(self.headers[name].num_bytes)
        return tensors

    def _by_shard(self, names: Iterable[str]) -> dict[str, list[str]]:
        by_shard: dict[str, list[str]] = defaultdict(list)
        for name in dict.fromkeys(names):
            if name not in self.headers:
                raise ModelError(f"{name} is missing from {self.folder}: download the model again")
            by_shard[self.headers[name].shard].append(name)
        return by_shard

    def _read_shard(self, shard: str, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        path = self.folder / shard
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} can't be read: {error}") from None
