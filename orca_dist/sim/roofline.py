"""What an iteration costs at least on a datasheet's device, as a sum of named parts.

Each part is the slower of arithmetic and memory: a layer's matrices are read once
for the whole batch, a request's keys and values once for it alone (Orca §3.2:
only attention is not batched). A stage of several devices splits all of it
evenly and adds two all-reduces a layer (Megatron's intra-layer parallelism).
Every peak is scaled by one efficiency; nothing else is fitted.

    matmul     layers x max(2 W T / peak, R b / bandwidth)
    attention  layers x max(4 heads d A / peak, 2 kv_heads d b C / bandwidth)
    embedding  T h b / bandwidth                               (first stage)
    head       max(2 h V S / peak, h V b / bandwidth)          (last stage)
    allreduce  layers x 2 x 2 (n - 1) / n x T h b / link       (n devices a stage)
    launch     layers x kernels x gap

T tokens, S of them sampled, C slots of context, A attended slots, W weights of a
layer that a token goes through, R those that are read, b bytes an element, h hidden
size, V vocabulary. R is W but for the experts of a layer that has E of them, of which
a token goes through K: of these, E (1 - (1 - K / E)^T) are read, as if each were as
likely as any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orca_dist.core import Plan, split_layers
from orca_dist.errors import ConfigError
from orca_dist.sim.batch import BatchShape, batch_shape
from orca_dist.sim.hardware import Device
from orca_dist.sim.pipeline import PlanTimes
from orca_dist.sim.shapes import ModelShape

KERNELS_PER_LAYER = 12
"""Two norms, four projections and the attention between them, two of the MLP with its
activation, and two additions, give or take one: fused kernels of a decoder's layer."""
LAUNCH_GAP_S = 0.9e-6
"""Between two queued kernels: 3.8 us each where the kernel itself takes 2.9 us (NVIDIA's
blog on CUDA graphs)."""
MEMORY_SHARE = 0.9  # of a device's memory, for weights and KV


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one iteration at one stage, or in one layer, by what they are spent on."""

    matmul_s: float
    attention_s: float
    allreduce_s: float
    launch_s: float
    embedding_s: float = 0.0
    head_s: float = 0.0

    @property
    def total_s(self) -> float:
        layers_s = self.matmul_s + self.attention_s + self.allreduce_s + self.launch_s
        return self.embedding_s + layers_s + self.head_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a model lies on devices: `split` are the layers of each stage.

    `link_bytes_s` is one direction between neighbouring stages, all their devices together;
    `links_bytes_s` says it for each stage's link to the next where they are not all alike.
    """

    split: tuple[int, ...]
    device: Device
    tensor_parallel: int = 1
    itemsize: int = 2
    efficiency: float = 1.0
    link_bytes_s: float
    links_bytes_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Of one stage, all its devices together. `slot_bytes`: KV of one token in its layers."""

    weights_bytes: int
    slot_bytes: int
    room_bytes: float

    @property
    def slots(self) -> int:
        """Beside the weights; 0 or less where those alone don't fit."""
        return math.floor((self.room_bytes - self.weights_bytes) / self.slot_bytes)


class RooflineCost:
    """The Cost of a model on a placement."""

    def __init__(self, shape: ModelShape, placement: Placement) -> None:
        device, scale = placement.device, placement.efficiency * placement.tensor_parallel
        self.shape = shape
        self.placement = placement
        self._flop_s = device.flop_s * scale * (2 / placement.itemsize)
        self._memory_bytes_s = device.memory_bytes_s * scale
        self._device_link_bytes_s = device.link_bytes_s * placement.efficiency
        self._row_bytes = shape.hidden_size * placement.itemsize
        self._layers = split_layers(shape.num_layers, len(placement.split), placement.split)
        self._mixtures = [shape.num_mixtures(layers) for layers in self._layers]

    @property
    def num_stages(self) -> int:
        return len(self.placement.split)

    def times(self, plan: Plan) -> PlanTimes:
        batch = batch_shape(plan)
        beside_s = self._beside_matmuls(batch).total_s
        stage_s = [
            layers * beside_s + matmul_s
            for layers, matmul_s in zip(
                self.placement.split, self._matmuls_s(batch.num_tokens), strict=True
            )
        ]
        stage_s[0] += self._embedding_s(batch)
        stage_s[-1] += self._head_s(batch)
        row_bytes = batch.num_tokens * self._row_bytes
        return PlanTimes(
            stage_s,
            row_bytes / self.placement.link_bytes_s,
            [row_bytes / link_bytes_s for link_bytes_s in self.placement.links_bytes_s],
        )

    def stage_time(self, batch: BatchShape, stage: int) -> StageTime:
        """The parts of one stage's time; see the head of this file."""
        layers, layer = self.placement.split[stage], self._beside_matmuls(batch)
        return StageTime(
            matmul_s=self._matmuls_s(batch.num_tokens)[stage],
            attention_s=layers * layer.attention_s,
            allreduce_s=layers * layer.allreduce_s,
            launch_s=layers * layer.launch_s,
            embedding_s=0.0 if stage else self._embedding_s(batch),
            head_s=self._head_s(batch) if stage == self.num_stages - 1 else 0.0,
        )

    def _beside_matmuls(self, batch: BatchShape) -> StageTime:
        """Of a layer; all are alike in this."""
        return StageTime(
            matmul_s=0.0,
            attention_s=self._attention_s(batch),
            allreduce_s=self._allreduce_s(batch.num_tokens),
            launch_s=KERNELS_PER_LAYER * LAUNCH_GAP_S,
        )

    def _matmuls_s(self, rows: int) -> list[float]:
        """Of each stage's layers."""
        plain_s = self._weights_s(self.shape.layer_weights, rows)
        mixture_s = self._mixture_s(rows) if any(self._mixtures) else 0.0
        return [
            (layers - mixtures) * plain_s + mixtures * mixture_s
            for layers, mixtures in zip(self.placement.split, self._mixtures, strict=True)
        ]

    def _mixture_s(self, rows: int) -> float:
        """Matmuls of a layer that has experts."""
        shape = self.shape
        assert shape.experts is not None
        computed = shape.mixture_weights(shape.experts.num_chosen)
        return self._weights_s(computed, rows, shape.mixture_weights(shape.experts_read(rows)))

    def _embedding_s(self, batch: BatchShape) -> float:
        return batch.num_tokens * self._row_bytes / self._memory_bytes_s

    def kv_tokens(self) -> int:
        """KV slots beside the weights, by the stage with the least room.

        Raises ConfigError where the weights alone don't fit.
        """
        return min(self._stage_slots(stage) for stage in range(self.num_stages))

    def stage_memory(self, stage: int) -> StageMemory:
        """The embedding is the first stage's, the head, as large, the last one's."""
        shape, placement, layers = self.shape, self.placement, self._layers[stage]
        return StageMemory(
            weights_bytes=shape.stage_weights(layers) * placement.itemsize,
            slot_bytes=len(layers) * shape.kv_elements * placement.itemsize,
            room_bytes=placement.device.memory_bytes * placement.tensor_parallel * MEMORY_SHARE,
        )

    def _weights_s(self, weights: float, rows: int, read: float | None = None) -> float:
        """`weights` that each row is multiplied by; `read`: if other ones are read of memory."""
        read = weights if read is None else read
        return max(
            2 * weights * rows / self._flop_s,
            read * self.placement.itemsize / self._memory_bytes_s,
        )

    def _attention_s(self, batch: BatchShape) -> float:
        shape = self.shape
        return max(
            4 * shape.num_heads * shape.head_dim * batch.attended / self._flop_s,
            shape.kv_elements * self.placement.itemsize * batch.context / self._memory_bytes_s,
        )

    def _head_s(self, batch: BatchShape) -> float:
        sampled = batch.num_sampled
        return self._weights_s(self.shape.head_weights, sampled) if sampled else 0.0

    def _allreduce_s(self, rows: int) -> float:
        num = self.placement.tensor_parallel
        return 4 * (num - 1) / num * rows * self._row_bytes / self._device_link_bytes_s

    def _stage_slots(self, stage: int) -> int:
        memory, placement = self.stage_memory(stage), self.placement
        if memory.weights_bytes >= memory.room_bytes:
            raise ConfigError(
                f"stage {stage}: its weights take {memory.weights_bytes / 1e9:.1f} GB, "
                f"{MEMORY_SHARE:.0%} of {placement.tensor_parallel} x {placement.device.name} are "
                f"{memory.room_bytes / 1e9:.1f} GB; take more stages or a higher --tensor-parallel"
            )
        return memory.slots
