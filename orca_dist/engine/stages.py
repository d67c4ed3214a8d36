"""What a pipeline is made of and heard of: places, stages, their losses. No behaviour.

A Placement puts stages somewhere; a Patrol watches over them while a pipeline is
opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from orca_dist.bootstrap import StageBootstrap
from orca_dist.config import LogConfig
from orca_dist.errors import StartupError
from orca_dist.proto.v1 import control_pb2 as pb

OnDeath = Callable[[int, str], None]
OnProgress = Callable[[str], None]
OnLoad = Callable[[int, int], None]  # bytes of weights read so far, and in all


class Placement(Protocol):
    """Puts one stage on each of its places, and tells when one dies."""

    @property
    def control_host(self) -> str:
        """Address on which stages can reach this process."""
        ...

    def launch(self, bootstraps: Sequence[StageBootstrap], on_death: OnDeath) -> None:
        """Start every stage. on_death(stage, why) may come on any thread, once a stage."""
        ...

    def replace(self, bootstrap: StageBootstrap, on_death: OnDeath) -> None:
        """Make sure that a stage is dead, and start another in its place.

        Nothing is heard of the dead one any more.
        """
        ...

    def why_missing(self, stages: Collection[int]) -> str:
        """Why these have not come, where it is for want of a place; else empty."""
        ...

    def close(self) -> None:
        """Kill what is left and give back all resources; any number of times."""
        ...


class Patrol(Protocol):
    """Watches over the stages while a pipeline is opened again; each method may raise."""

    def watch(self, connected: Collection[int]) -> None:
        """Called several times a second; `connected` stages answer pings."""
        ...

    def beat(self, stage: int, pong: pb.Pong) -> None:
        """A ping was answered."""
        ...

    def link_broke(self, status: str, why: str) -> None:
        """A stage's link failed; the fault may be its neighbour's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What every stage is told. `layers` has one range a stage.

    num_blocks: KV blocks; None: as many as `memory_share` of what weights and activations leave
    holds where it is tightest, at `layer_block_bytes` a block and layer, and no more than
    `max_blocks`. activation_bytes: of each stage, as estimated, with what its graphs need; they
    are for decodes of at most `graph_rows` rows, 0: there are none.
    """

    model: str
    load_format: str
    layers: tuple[range, ...]
    dtype: str
    device: str
    link: str
    num_threads: int
    block_size: int
    num_blocks: int | None
    max_blocks: int
    layer_block_bytes: int
    memory_share: float
    activation_bytes: tuple[int, ...]
    graph_rows: int
    attention_backend: str
    inflight: int
    num_token_ids: int
    start_timeout_s: float
    link_timeout_s: float
    log: LogConfig

    @property
    def num_stages(self) -> int:
        return len(self.layers)


@dataclass(slots=True)
class StageStatus:
    """A stage as `info` shows it."""

    index: int
    layers: range
    node: str = ""
    pid: int = 0
    actor_id: str = ""
    device: str = ""
    gpus: tuple[str, ...] = ()  # their ids on the node, where its launcher reserved some
    state: str = "starting"
    versions: str = ""
    num_requests: int = 0  # that it keeps tokens and blocks of, as its last heartbeat said

    def __str__(self) -> str:
        return f"stage {self.index} (pid {self.pid}, node {self.node or 'unknown'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A stage is gone, and why; `life` is how often it had been replaced by then."""

    stage: int
    why: str
    life: int


News = tuple[int, pb.StageMessage] | Lost


class StageLost(StartupError):
    """A stage is lost before the pipeline runs."""

    def __init__(self, status: StageStatus, why: str) -> None:
        super().__init__(f"{status} did not start: {why}")
        self.stage = status
        self.why = why


class LinkBroken(StartupError):
    """Stages could not be connected, though each of them lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """Where the time of a start went; bytes over all stages, which load side by side."""

    place_s: float
    load_s: float
    connect_s: float
    fetched_bytes: int
    read_bytes: int

    def __str__(self) -> str:
        speed = self.read_bytes / 1e9 / max(self.load_s, 1e-9)
        read = f"{self.read_bytes / 1e6:.0f} MB read at {speed:.2f} GB/s"
        fetched = f"{self.fetched_bytes / 1e6:.0f} MB fetched, " if self.fetched_bytes else ""
        return (
            f"place {self.place_s:.1f} s, load {self.load_s:.1f} s ({fetched}{read}), "
            f"connect {self.connect_s:.1f} s"
        )
