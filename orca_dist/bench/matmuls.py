"""One stage's matmuls and nothing else: how long they take, by the rows of a batch.

A process of its own, as a stage is: bench.roofline starts one for each, with its
StageMatmuls as JSON on the first line of stdin. Every further line is a Round, answered
with its Seconds. Weights are random, of their own for each layer as in a stage, and such
as bfloat16 holds: what counts are their sizes.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from orca_kernels import Linear, kernels_for

from orca_dist.device.cpu import CpuDevice
from orca_dist.device.cuda import CudaDevice
from orca_dist.device.seam import Device
from orca_dist.spec import ModelSpec, load_spec

READ_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}  # more than caches hold, long beside a launch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMatmuls:
    """Which stage of which model; `gpu`: where it computes on one, which of this host's."""

    model: str
    device: str
    gpu: int
    num_layers: int
    has_head: bool
    dtype: str
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Numbers of rows to time: of whole batches, and of those rows that sample."""

    rows: list[int]
    sampled: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """The answer to a Round: of all layers and of the head; and how fast memory is read.

    `layer_bytes`, `head_bytes`: what a pass over all layers or the head reads of weights.
    """

    layers: list[float]
    head: list[float]
    read_bytes_s: float
    layer_bytes: int
    head_bytes: int


class Matmuls:
    """The packed matrices of a stage."""

    def __init__(self, spec: ModelSpec, stage: StageMatmuls) -> None:
        self._dtype: torch.dtype = getattr(torch, stage.dtype)
        self._device: Device = CudaDevice(stage.gpu) if stage.device == "cuda" else CpuDevice()
        self._on = self._device.torch_device
        self._kernels = kernels_for(self._on, self._dtype, stage.num_threads)
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        one_layer = {  # as the decoder fuses them: outputs, inputs
            "q": (q_size + 2 * kv_size, hidden),
            "o": (hidden, q_size),
            "gate": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        self._widths = (hidden, q_size, inner)
        self._layers = [
            (inputs, self._linear(outputs, inputs, has_bias=name in spec.biases))
            for _ in range(stage.num_layers)
            for name, (outputs, inputs) in one_layer.items()
        ]
        head = (spec.vocab_size, hidden)
        self._head = [(hidden, self._linear(*head, has_bias=False))] if stage.has_head else []

        self._read = torch.ones(READ_BYTES[stage.device] // 4, device=self._on)

    def seconds(self, wanted: Round) -> Seconds:
        """Each number of rows once."""
        return Seconds(
            layers=[self._time(self._layers, rows) for rows in wanted.rows],
            head=[self._time(self._head, rows) for rows in wanted.sampled],
            read_bytes_s=self._read.nbytes / _seconds(self._read.sum, self._device),
            layer_bytes=sum(linear.nbytes for _, linear in self._layers),
            head_bytes=sum(linear.nbytes for _, linear in self._head),
        )

    def _linear(self, outputs: int, inputs: int, *, has_bias: bool) -> Linear:
        random_FK = torch.empty(outputs, inputs, device=self._on).uniform_(-0.1, 0.1)
        weight_FK = random_FK.bfloat16().to(self._dtype)
        bias_F = torch.zeros(outputs, dtype=self._dtype, device=self._on) if has_bias else None
        return self._kernels.linear(weight_FK, bias_F)

    def _time(self, linears: list[tuple[int, Linear]], rows: int) -> float:
        x = {
            width: torch.ones(rows, width, dtype=self._dtype, device=self._on)
            for width in self._widths
        }

        def run() -> None:
            for width, linear in linears:
                linear(x[width])

        return _seconds(run, self._device)


def _seconds(call: Callable[[], object], device: Device) -> float:
    """Until the device has done it, with nothing before it."""
    device.record().synchronize()
    start_s = time.perf_counter()
    call()
    device.record().synchronize()
    return time.perf_counter() - start_s


@torch.inference_mode()
def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench's to handle; stdin ends with it
    stage = StageMatmuls(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(stage.num_threads)
    matmuls = Matmuls(load_spec(Path(stage.model)), stage)
    for line in sys.stdin:
        seconds = matmuls.seconds(Round(**json.loads(line)))
        print(json.dumps(dataclasses.asdict(seconds)), flush=True)


if __name__ == "__main__":
    main()
