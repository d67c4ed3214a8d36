"""What a stage loads: its own tensors, from a folder, from the Hub, or made up.

Fetches no shard and reads no byte that its layers don't need, and counts both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path

import torch

from orca_dist.config import LoadFormat
from orca_dist.errors import ModelError
from orca_dist.proto.v1.control_pb2 import Setup
from orca_dist.spec import ModelSpec, load_spec
from orca_dist.weights.checkpoint import Checkpoint
from orca_dist.weights.dummy import dummy_tensor
from orca_dist.weights.headers import check_tensors, tensor_names
from orca_dist.weights.lazy import LazyTensors, ReadTensor
from orca_dist.weights.names import LM_HEAD, stage_tensors, tensor_shapes
from orca_dist.weights.source import parse_source

OnBytes = Callable[[int, int], None]  # bytes done, bytes in all


class StageWeights:
    """fetch(), then read(), then ask for each tensor.

    Bytes: fetched over the network, read of files.
    """

    spec: ModelSpec

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self._model = parse_source(setup.model)
        self._folder = Path(setup.model)
        self._is_dummy = setup.load_format == LoadFormat.DUMMY
        self._layers = range(setup.first_layer, setup.end_layer)
        self._dtype: torch.dtype = getattr(torch, setup.dtype)
        self._device = device
        self.fetched_bytes = self.read_bytes = 0
        self.fetch_s = self.read_s = 0.0

    def fetch(self, on_bytes: OnBytes) -> None:
        """The config and this stage's shards to this node, where they aren't here."""
        if self._model is not None:
            from orca_dist.weights.hub import fetch_stage_weights, stage_config

            start_s = time.perf_counter()
            self._folder = stage_config(self._model)
            if not self._is_dummy:
                self.fetched_bytes = fetch_stage_weights(self._model, self._layers, on_bytes)
            self.fetch_s = time.perf_counter() - start_s
        elif not self._folder.is_dir():
            raise ModelError(
                f"the model's folder {self._folder} is not on this node: put it there under the "
                "same path, on a file system that all nodes share or, if it is the default model, "
                "by orca-dist model fetch; or give an id of the Hub"
            )
        self.spec = load_spec(self._folder)

    def read(self, on_bytes: OnBytes) -> LazyTensors:
        """This stage's tensors by our names, for its device; each is read when it is asked for."""
        names = self._names()
        shapes = tensor_shapes(self.spec, names)
        make = partial(self._made_up, shapes) if self._is_dummy else self._reader(names, on_bytes)
        return LazyTensors(names, partial(self._timed, make))

    def told(self, held_bytes: int) -> str:
        """For the log; `held_bytes` are what the weights take in memory."""
        size = f"{held_bytes / 1e6:.0f} MB for {str(self._dtype).removeprefix('torch.')}"
        if self._is_dummy:
            return f"{size}, made up in {self.read_s:.1f} s"
        speed = self.read_bytes / 1e9 / max(self.read_s, 1e-9)
        read = f"read in {self.read_s:.1f} s ({speed:.2f} GB/s)"
        if not self.fetched_bytes:
            return f"{size}, {read}"
        fetched = f"{self.fetched_bytes / 1e6:.0f} MB fetched in {self.fetch_s:.1f} s"
        return f"{size}, {fetched}, {read}"

    def _names(self) -> dict[str, str]:
        """Ours -> Hugging Face's."""
        if self._is_dummy:
            available: Container[str] = () if self.spec.tie_word_embeddings else (LM_HEAD,)
        else:
            available = tensor_names(self._folder)
        return stage_tensors(self.spec, self._layers, available)

    def _timed(self, make: ReadTensor, name: str) -> torch.Tensor:
        start_s = time.perf_counter()
        tensor = make(name)
        self.read_s += time.perf_counter() - start_s
        return tensor

    def _made_up(self, shapes: Mapping[str, tuple[int, ...]], name: str) -> torch.Tensor:
        return dummy_tensor(name, shapes[name], self._dtype).to(self._device)

    def _reader(self, names: Mapping[str, str], on_bytes: OnBytes) -> ReadTensor:
        """Raises ModelError unless all of `names` are there in their right shapes."""
        checkpoint = Checkpoint(self._folder, names.values())
        check_tensors(checkpoint.headers, self.spec, names)
        total = sum(checkpoint.headers[name].num_bytes for name in set(names.values()))

        def read(name: str) -> torch.Tensor:
            tensor = checkpoint.tensor(name, dtype=self._dtype, device=self._device)
            self.read_bytes = checkpoint.bytes_read
            on_bytes(self.read_bytes, total)
            return tensor

        return read
