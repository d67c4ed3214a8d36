"""How a model may lie on a cluster: stages by devices of each, and whether that fits in memory.

Devices that share a stage are in one node; stages fill a node before the next, so
that at most one link leaves each. Knows nothing of requests but how long the longest is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orca_dist.config import ScheduleConfig
from orca_dist.core import split_layers
from orca_dist.sim.hardware import NETWORK_BYTES_S, Device
from orca_dist.sim.roofline import Placement, RooflineCost, StageMemory
from orca_dist.sim.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Alike nodes; `network_bytes_s` is one direction from one to the next."""

    device: Device
    num_nodes: int
    devices_per_node: int
    network_bytes_s: float = NETWORK_BYTES_S

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`num_stages` stages of `tensor_parallel` devices each."""

    num_stages: int
    tensor_parallel: int

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A layout without room for the weights and one longest request, by its fullest device."""

    layout: Layout
    needed_bytes: float
    room_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model on a cluster. `longest`: KV slots of the longest request, for which every stage
    has to have room, in whole blocks."""

    shape: ModelShape
    cluster: Cluster
    longest: int
    itemsize: int = 2
    efficiency: float = 1.0

    def shards(self) -> list[int]:
        """Devices that a stage may have: they divide a node and the model's heads evenly."""
        shape, most = self.shape, self.cluster.devices_per_node
        whole = (most, shape.num_heads, shape.num_kv_heads)
        return [num for num in range(1, most + 1) if not any(total % num for total in whole)]

    def max_stages(self, tensor_parallel: int) -> int:
        """By the devices and by the layers."""
        per_node = self.cluster.devices_per_node // tensor_parallel
        return min(self.shape.num_layers, self.cluster.num_nodes * per_node)

    def layouts(self) -> Iterator[Layout]:
        """Powers of two of stages, the most that there can be, and the fewest that fit."""
        for num in self.shards():
            for stages in self._stage_counts(num):
                yield Layout(num_stages=stages, tensor_parallel=num)

    def _stage_counts(self, tensor_parallel: int) -> list[int]:
        most = self.max_stages(tensor_parallel)
        counts = {most, *(2**power for power in range(most.bit_length()))}
        fewest = self.fewest_stages(tensor_parallel)
        return sorted(counts | ({fewest} if fewest and fewest <= most else set()))

    def fewest_stages(self, tensor_parallel: int) -> int | None:
        """That have the room, on however many nodes; None: not even with a layer each."""
        for stages in range(1, self.shape.num_layers + 1):
            if self.misfit(Layout(num_stages=stages, tensor_parallel=tensor_parallel)) is None:
                return stages
        return None

    def smallest(self) -> Layout | None:
        """Of the fewest devices that would do, on however many nodes."""
        found = [
            Layout(num_stages=stages, tensor_parallel=num)
            for num in self.shards()
            if (stages := self.fewest_stages(num))
        ]
        return min(found, key=lambda layout: layout.num_devices, default=None)

    def misfit(self, layout: Layout) -> Misfit | None:
        """None where it fits."""
        fullest = max(self.memory(layout), key=self._needed_bytes)
        if self._needed_bytes(fullest) <= fullest.room_bytes:
            return None
        return Misfit(
            layout=layout,
            needed_bytes=self._needed_bytes(fullest) / layout.tensor_parallel,
            room_bytes=fullest.room_bytes / layout.tensor_parallel,
        )

    def memory(self, layout: Layout) -> list[StageMemory]:
        """Of each stage."""
        cost = self.cost(layout)
        return [cost.stage_memory(stage) for stage in range(layout.num_stages)]

    def _needed_bytes(self, stage: StageMemory) -> int:
        block_size = ScheduleConfig().block_size
        slots = -(-self.longest // block_size) * block_size
        return stage.weights_bytes + slots * stage.slot_bytes

    def cost(self, layout: Layout) -> RooflineCost:
        """What iterations cost; layers are split evenly."""
        link_bytes_s = self.cluster.device.link_bytes_s
        split = split_layers(self.shape.num_layers, layout.num_stages)
        nodes = [self.node(layout, stage) for stage in range(layout.num_stages)]
        crossing = [a != b for a, b in zip(nodes, [*nodes[1:], nodes[-1]], strict=True)]
        placement = Placement(
            split=tuple(len(layers) for layers in split),
            device=self.cluster.device,
            tensor_parallel=layout.tensor_parallel,
            itemsize=self.itemsize,
            efficiency=self.efficiency,
            link_bytes_s=link_bytes_s,
            links_bytes_s=tuple(
                self.cluster.network_bytes_s if cross else link_bytes_s for cross in crossing
            ),
        )
        return RooflineCost(self.shape, placement)

    def node(self, layout: Layout, stage: int) -> int:
        """Where a stage is."""
        return stage // (self.cluster.devices_per_node // layout.tensor_parallel)
