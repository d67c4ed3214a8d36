"""Reads chosen tensors of a checkpoint folder onto a device; the torch end of `headers`.

A stage opens only the shards that hold its tensors and reads only those bytes.
Knows Hugging Face's names only; `names` says which of them a stage needs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path

import torch

from orca_dist.errors import ModelError
from orca_dist.spec import ModelSpec
from orca_dist.weights.headers import Headers, TensorHeader, check_headers, read_headers

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES = 2**20


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
        self._starts: dict[str, dict[str, int]] = {}

    def names(self) -> frozenset[str]:
        """Hugging Face's names of all tensors in the checkpoint."""
        return frozenset(self.headers)

    def check(self, spec: ModelSpec) -> None:
        """Raises ModelError unless every tensor of the whole model is there in its right shape."""
        check_headers(self.headers, spec)

    def tensor(self, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An owned copy on `device`, of `dtype` whatever the file's; read anew each time.

        Raises ModelError naming a tensor or file that isn't there.
        """
        header = self._header(name)
        shard, start = self._place(name)
        with self._open(shard) as file:
            file.seek(start)
            tensor = _read_tensor(file, header, dtype)
        self.bytes_read += header.num_bytes
        return tensor.to(device)

    def _header(self, name: str) -> TensorHeader:
        if name not in self.headers:
            raise ModelError(f"{name} is missing from {self.folder}: download the model again")
        return self.headers[name]

    def _place(self, name: str) -> tuple[str, int]:
        """Its shard, and where it begins there; a shard's header is read once."""
        shard = self._header(name).shard
        if shard not in self._starts:
            with self._open(shard) as file:
                self._starts[shard] = _starts(file)
        return shard, self._starts[shard][name]

    @contextmanager
    def _open(self, shard: str) -> Iterator[RawIOBase]:
        """Raises ModelError where it can't be opened, or what is done with it fails."""
        path = self.folder / shard
        try:
            with path.open("rb", buffering=0) as file:
                yield file
        except (OSError, EOFError) as error:
            raise ModelError(f"{path} can't be read: {error}") from None


def _starts(file: RawIOBase) -> dict[str, int]:
    """Where each tensor begins, of a file whose header has been verified: in `headers`.

    The format: 8 bytes with the length of a JSON header, the header, the tensors' bytes.
    """
    header_len = int.from_bytes(_read_header(file, 8), "little")
    header = json.loads(_read_header(file, header_len))
    return {
        name: 8 + header_len + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_header(file: RawIOBase, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    _read(file, memoryview(data))
    return data


def _read_tensor(file: RawIOBase, header: TensorHeader, dtype: torch.dtype) -> torch.Tensor:
    """Straight into its own memory; of another type piece by piece, through a cache's worth."""
    tensor = torch.empty(header.shape, dtype=dtype)
    stored = DTYPES[header.dtype]
    if stored == dtype:
        _read(file, _bytes(tensor.view(-1)))
        return tensor
    piece = torch.empty(PIECE_BYTES // stored.itemsize, dtype=stored)
    for target in tensor.view(-1).split(len(piece)):
        _read(file, _bytes(piece[: len(target)]))
        target.copy_(piece[: len(target)])
    return tensor


def _bytes(tensor_N: torch.Tensor) -> memoryview:
    return memoryview(tensor_N.view(torch.uint8).numpy())


def _read(file: RawIOBase, target: memoryview) -> None:
    """Fills `target`, in as many reads as the system takes."""
    while target.nbytes:
        num_bytes = file.readinto(target)
        if not num_bytes:
            raise EOFError("it became shorter while it was read")
        target = target[num_bytes:]
