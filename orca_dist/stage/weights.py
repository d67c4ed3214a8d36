"""What a stage loads: its own tensors, from a folder, from the Hub, or made up.

Fetches no shard and reads no byte that its layers don't need, and counts both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from orca_dist.config import LoadFormat
from orca_dist.proto.v1.control_pb2 import Setup
from orca_dist.spec import ModelSpec, load_spec
from orca_dist.weights.checkpoint import Checkpoint
from orca_dist.weights.dummy import dummy_tensors
from orca_dist.weights.headers import check_tensors, tensor_names
from orca_dist.weights.names import LM_HEAD, stage_tensors, tensor_shapes
from orca_dist.weights.source import parse_source

OnBytes = Callable[[int, int], None]  # bytes done, bytes in all


class StageWeights:
    """fetch(), then read(). Bytes: fetched over the network, read of files, held in memory."""

    spec: ModelSpec

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self._model = parse_source(setup.model)
        self._folder = Path(setup.model)
        self._is_dummy = setup.load_format == LoadFormat.DUMMY
        self._layers = range(setup.first_layer, setup.end_layer)
        self._dtype: torch.dtype = getattr(torch, setup.dtype)
        self._device = device
        self.fetched_bytes = self.read_bytes = self.weight_bytes = 0
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
        self.spec = load_spec(self._folder)

    def read(self, on_bytes: OnBytes) -> dict[str, torch.Tensor]:
        """This stage's tensors under our names, on its device."""
        start_s = time.perf_counter()
        if self._is_dummy:
            names, tensors = self._made_up()
        else:
            names, tensors = self._read(on_bytes)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.read_s = time.perf_counter() - start_s
        return {ours: tensors[theirs] for ours, theirs in names.items()}

    def told(self) -> str:
        """For the log."""
        size = f"{self.weight_bytes / 1e6:.0f} MB of {str(self._dtype).removeprefix('torch.')}"
        if self._is_dummy:
            return f"{size}, made up in {self.read_s:.1f} s"
        speed = self.read_bytes / 1e9 / max(self.read_s, 1e-9)
        read = f"read in {self.read_s:.1f} s ({speed:.2f} GB/s)"
        if not self.fetched_bytes:
            return f"{size}, {read}"
        fetched = f"{self.fetched_bytes / 1e6:.0f} MB fetched in {self.fetch_s:.1f} s"
        return f"{size}, {fetched}, {read}"

    def _made_up(self) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        head = () if self.spec.tie_word_embeddings else (LM_HEAD,)
        names = stage_tensors(self.spec, self._layers, head)
        shapes = tensor_shapes(self.spec, names)
        tensors = dummy_tensors(shapes, names.values(), dtype=self._dtype, device=self._device)
        return names, tensors

    def _read(self, on_bytes: OnBytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        names = stage_tensors(self.spec, self._layers, tensor_names(self._folder))
        checkpoint = Checkpoint(self._folder, names.values())
        check_tensors(checkpoint.headers, self.spec, names)
        total = sum(checkpoint.headers[name].num_bytes for name in set(names.values()))
        tensors = checkpoint.read(
            names.values(),
            dtype=self._dtype,
            device=self._device,
            progress=lambda _: on_bytes(checkpoint.bytes_read, total),
        )
        self.read_bytes = checkpoint.bytes_read
        return names, tensors
