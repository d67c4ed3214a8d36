"""The flags of `simulate` that say what an iteration costs: a tick, a datasheet, or a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from orca_dist.config import Dtype, ScheduleConfig
from orca_dist.core import split_layers
from orca_dist.errors import ConfigError
from orca_dist.sim.hardware import DEVICES, find_device
from orca_dist.sim.paper import EFFICIENCY
from orca_dist.sim.pipeline import ControlLatency, Cost
from orca_dist.sim.roofline import Placement, RooflineCost
from orca_dist.sim.shapes import ModelShape, gpt_shape, shape_of
from orca_dist.sim.table import CostTable, read_cost_table
from orca_dist.sim.ticks import TickCost
from orca_dist.spec import load_spec

ITEMSIZE = {Dtype.AUTO: 2, Dtype.FLOAT16: 2, Dtype.BFLOAT16: 2, Dtype.FLOAT32: 4}
MAX_SIZE = 10_000_000
HEAD_DIM = 128
MAX_STAGES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCost:
    """`kv_tokens` None: as many as may be needed."""

    cost: Cost
    latency: ControlLatency
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFlags:
    """--gpu with MODEL or --layers and --hidden; or --cost; or neither, for ticks."""

    gpu: str = ""
    """Device of each shard of a stage: A100-40GB, A100-80GB, H100, H200, L4, L40S or CPU."""
    layers: int | None = None
    """Layers of a GPT-style model (an MLP four times as wide), in place of MODEL."""
    hidden: int | None = None
    """Its hidden size; heads are of size 128."""
    tensor_parallel: int = 1
    """Devices that share a stage's layers."""
    dtype: Dtype = Dtype.AUTO
    """Of weights, activations and KV; auto: 16 bits."""
    efficiency: float = EFFICIENCY
    """Share of the datasheet's peaks that is reached; the default is what the paper's are."""
    link_gb_s: float | None = None
    """GB per second from a stage to the next; by default the device's NVLink, or PCIe."""
    cost: Path | None = None
    """Measured costs, as orca-dist profile writes them, in place of --gpu."""
    stage_s: float = 1.0
    """Without --gpu and --cost: seconds that every stage takes for every iteration."""
    plan_latency_s: float = 0.0
    """From the scheduler to the stages."""
    token_latency_s: float = 0.0
    """From the last stage back to the scheduler."""

    def cost_of(self, model: str, schedule: ScheduleConfig) -> SimulatedCost:
        """Raises ConfigError for what doesn't fit together, ModelError for a bad folder."""
        self._check(model, schedule)
        if self.cost is not None:
            return self._measured(read_cost_table(self.cost), schedule)
        if not self.gpu:
            ticks = TickCost(num_stages=schedule.stages, stage_s=self.stage_s)
            return SimulatedCost(cost=ticks, latency=self._latency)
        shape = model_shape(model, self.layers, self.hidden)
        roofline = RooflineCost(shape, self._placement(shape, schedule))
        return SimulatedCost(cost=roofline, latency=self._latency, kv_tokens=roofline.kv_tokens())

    @property
    def _latency(self) -> ControlLatency:
        return ControlLatency(plan_s=self.plan_latency_s, token_s=self.token_latency_s)

    def _check(self, model: str, schedule: ScheduleConfig) -> None:
        within("stages", schedule.stages, 1, MAX_STAGES)
        within("tensor_parallel", self.tensor_parallel, 1, MAX_STAGES)
        positive("stage_s", self.stage_s)
        positive("efficiency", self.efficiency)
        if self.link_gb_s is not None:
            positive("link_gb_s", self.link_gb_s)
        for name, latency_s in (
            ("plan_latency_s", self.plan_latency_s),
            ("token_latency_s", self.token_latency_s),
        ):
            if not 0 <= latency_s < math.inf:
                raise ConfigError(f"{name} = {latency_s}: must be 0 or more, and finite")
        self._check_source(model, schedule)

    def _check_source(self, model: str, schedule: ScheduleConfig) -> None:
        """One source of costs, with all that it needs."""
        shaped = bool(model) or self.layers is not None or self.hidden is not None
        if self.cost is not None and (self.gpu or shaped):
            raise ConfigError(f"cost = {self.cost}: says it all; leave out --gpu and the model")
        if self.stage_s != 1 and (self.gpu or self.cost is not None):
            raise ConfigError(f"stage_s = {self.stage_s}: is for runs without --gpu and --cost")
        if shaped and not self.gpu:
            raise ConfigError(f"gpu: a model needs one of {', '.join(DEVICES)}")
        if self.gpu and not shaped:
            raise ConfigError(f"gpu = {self.gpu}: needs MODEL, or --layers and --hidden")
        if _sizes(schedule) and not shaped:
            raise ConfigError("split: needs MODEL, or --layers and --hidden, and --gpu")

    def _placement(self, shape: ModelShape, schedule: ScheduleConfig) -> Placement:
        device = find_device(self.gpu)
        try:
            split = split_layers(shape.num_layers, schedule.stages, _sizes(schedule) or None)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return Placement(
            split=tuple(len(layers) for layers in split),
            device=device,
            tensor_parallel=self.tensor_parallel,
            itemsize=ITEMSIZE[self.dtype],
            efficiency=self.efficiency,
            link_bytes_s=device.link_bytes_s if self.link_gb_s is None else self.link_gb_s * 1e9,
        )

    def _measured(self, table: CostTable, schedule: ScheduleConfig) -> SimulatedCost:
        if table.num_stages != schedule.stages:
            raise ConfigError(
                f"stages = {schedule.stages}: {self.cost} was measured on {table.num_stages}; "
                f"give --stages {table.num_stages}, or another table"
            )
        return SimulatedCost(cost=table, latency=table.latency, kv_tokens=table.kv_tokens)


def model_shape(model: str, layers: int | None, hidden: int | None) -> ModelShape:
    """Of a folder's config.json, or of a GPT of `layers` and `hidden`.

    Raises ConfigError for what doesn't go together, ModelError for a bad folder.
    """
    for name, value in (("layers", layers), ("hidden", hidden)):
        if value is not None:
            within(name, value, 1, MAX_SIZE)
    if model:
        if layers is not None or hidden is not None:
            raise ConfigError(f"model = {model}: has layers of its own; leave --layers out")
        return shape_of(load_spec(model_folder(model)))
    if layers is None or hidden is None:
        raise ConfigError("layers and hidden go together; give both, or MODEL")
    if hidden % HEAD_DIM:
        raise ConfigError(f"hidden = {hidden}: must be a multiple of {HEAD_DIM}")
    return gpt_shape(layers, hidden, head_dim=HEAD_DIM)


def model_folder(model: str) -> Path:
    """Raises ConfigError where there is none."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from orca_dist.weights.fetch import DEFAULT_MODEL, fetch_default_model

    if model == DEFAULT_MODEL.name:
        return fetch_default_model()
    raise ConfigError(
        f"model = {model}: is not a folder; give a Hugging Face model folder, or "
        f"{DEFAULT_MODEL.name}"
    )


def within(name: str, value: int, low: int, high: int) -> None:
    """Raises ConfigError otherwise."""
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value}: must be at least {low} and at most {high}")


def positive(name: str, value: float) -> None:
    """Raises ConfigError otherwise."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} = {value}: must be more than 0, and finite")


def _sizes(schedule: ScheduleConfig) -> tuple[int, ...]:
    """Layers of each stage where they are given; both auto and even are an even split here."""
    return tuple(part for part in schedule.split if isinstance(part, int))
