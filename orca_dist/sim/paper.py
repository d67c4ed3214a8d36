"""The Orca paper's evaluation (§6) as configurations: models, devices, workload, systems.

Everything here is from the paper or a datasheet, but for one number: EFFICIENCY,
the share of the datasheets' peaks that real kernels reach. It comes from one
anchor, figure 9c's orca(128), whose time the paper gives as half of 190 ms a
token: taken as one iteration of 128 requests with 144 tokens of context each
through the 175B model. It holds for both systems and all models.
"""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.config import ScheduleConfig, Switch
from orca_dist.core import Batching, Forming, MemoryKind, split_layers
from orca_dist.sim.batch import BatchShape
from orca_dist.sim.hardware import find_device
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.roofline import Placement, RooflineCost
from orca_dist.sim.shapes import gpt_shape
from orca_dist.sim.simulation import Setup

EFFICIENCY = 0.41
ANCHOR_S = 0.095
ANCHOR_BATCH = BatchShape(128, 128, 128 * 144, 128 * 144.0)

DEVICE = "A100-40GB"
NETWORK_BYTES_S = 1.6e12 / 8  # between nodes, which hold one stage each
PROMPT_LENS = Lengths(low=32, high=512)
OUTPUT_LENS = Lengths(low=1, high=128)
MAX_MODEL_LEN = 2048  # what FasterTransformer allocates for each request
TARGET_S = 0.190  # median normalised latency
ORCA_BATCH = 32
FT_BATCHES = ((1, 1), (8, 8))  # (batch, micro-batch): the paper's best
LARGER_FT_BATCHES = ((16, 8), (16, 16), (32, 16), (32, 32))
ORCA_BATCHES = (8, 16, 32)
HOMOGENEOUS = Lengths(listed=(128,)), Lengths(listed=(64,))
ALL_TOKENS = 1_000_000  # no bound on a batch's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """One row of table 1; its heads are of size 128."""

    name: str
    num_layers: int
    hidden_size: int
    num_stages: int
    tensor_parallel: int

    def cost(self, efficiency: float = EFFICIENCY) -> RooflineCost:
        """In fp16 on A100s with NVLink inside a node."""
        split = split_layers(self.num_layers, self.num_stages)
        placement = Placement(
            split=tuple(len(layers) for layers in split),
            device=find_device(DEVICE),
            tensor_parallel=self.tensor_parallel,
            efficiency=efficiency,
            link_bytes_s=NETWORK_BYTES_S,
        )
        return RooflineCost(gpt_shape(self.num_layers, self.hidden_size), placement)


def _model(name: str, layers: int, hidden: int, stages: int, tensor_parallel: int) -> PaperModel:
    return PaperModel(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_stages=stages,
        tensor_parallel=tensor_parallel,
    )


MODELS = {
    model.name: model
    for model in (
        _model("13b", 40, 5120, 1, 1),
        _model("101b", 80, 10240, 1, 8),
        _model("175b", 96, 12288, 2, 8),
        _model("341b", 120, 15360, 4, 8),
    )
}


def orca(cost: RooflineCost, max_batch_size: int = ORCA_BATCH) -> Setup:
    """Algorithm 1: whole prompts, full batches, slots for prompt and answer reserved."""
    return Setup(cost=cost, schedule=_schedule(cost, max_batch_size, Batching.ITERATION, None))


def faster_transformer(cost: RooflineCost, batch_size: int, micro_batch_size: int) -> Setup:
    """A batch goes through the stages in micro-batches and is answered when all of it has ended."""
    return Setup(
        cost=cost,
        schedule=_schedule(cost, batch_size, Batching.REQUEST, micro_batch_size),
        reserve_len=MAX_MODEL_LEN,
        whole_batches=True,
    )


def anchored_efficiency() -> float:
    """What EFFICIENCY is rounded from: the anchor's time at full peaks over the measured one.

    Launches take their time whatever the efficiency is.
    """
    cost = MODELS["175b"].cost(efficiency=1.0)
    parts = [cost.stage_time(ANCHOR_BATCH, stage) for stage in range(cost.num_stages)]
    launch_s = sum(part.launch_s for part in parts)
    return (sum(part.total_s for part in parts) - launch_s) / (ANCHOR_S - launch_s)


def _schedule(
    cost: RooflineCost, max_batch_size: int, batching: Batching, micro_batch_size: int | None
) -> ScheduleConfig:
    return ScheduleConfig(
        stages=cost.num_stages,
        max_batch_size=max_batch_size,
        max_batch_tokens=ALL_TOKENS,
        batching=batching,
        micro_batch_size=micro_batch_size,
        forming=Forming.PAPER,
        chunked_prefill=Switch.OFF,
        memory=MemoryKind.RESERVE,
        block_size=1,
        kv_tokens=cost.kv_tokens(),
    )
