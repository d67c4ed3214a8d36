"""The pipeline as the engine master sees it: stages started, plans out, news in.

Owns the stages' start (hello, setup, loaded, open, ready) and the control plane.
Where stages live is a Placement's business: Ray actors or local processes.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orca_dist.bootstrap import StageBootstrap
from orca_dist.config import LogConfig
from orca_dist.core import Plan
from orca_dist.engine.control import ControlPlane
from orca_dist.engine.wire import encode_plan
from orca_dist.errors import StartupError
from orca_dist.proto.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

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

    def close(self) -> None:
        """Kill what is left and give back all resources; any number of times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """What every stage is told. `layers` has one range a stage.

    num_blocks: KV blocks; None: as many as `gpu_memory_share` of the fullest stage's free
    memory holds, at `layer_block_bytes` a block and layer, and no more than `max_blocks`.
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
    gpu_memory_share: float
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
    state: str = "starting"
    versions: str = ""

    def __str__(self) -> str:
        return f"stage {self.index} (pid {self.pid}, node {self.node or 'unknown'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A stage is gone, and why."""

    stage: int
    why: str


News = tuple[int, pb.StageMessage] | Lost


@dataclass(slots=True)
class _Start:
    """How far the start has come."""

    hellos: dict[int, pb.Hello] = field(default_factory=dict)
    loaded: dict[int, pb.Loaded] = field(default_factory=dict)
    loading: dict[int, pb.LoadProgress] = field(default_factory=dict)
    ready: dict[int, pb.Ready] = field(default_factory=dict)


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


class Pipeline:
    """start() returns when every link has carried a dummy tensor; then plans may be sent."""

    def __init__(self, config: PipelineConfig, placement: Placement) -> None:
        self.config = config
        self.epoch = 1
        self.num_blocks = 0  # settled by start()
        self.stages = [StageStatus(i, layers) for i, layers in enumerate(config.layers)]
        self._placement = placement
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._tell: Callable[[News], None] = self._news.put
        self._lock = threading.Lock()  # whom to tell changes while streams are telling
        self._start = _Start()
        self._on_load: OnLoad = lambda done, total: None
        self._control = ControlPlane(
            host=placement.control_host,
            secret=(secret := secrets.token_hex(16)),
            num_stages=config.num_stages,
            on_message=lambda stage, message: self._on_news((stage, message)),
            on_broken=self._on_lost,
        )
        self._secret = secret
        self._deadline = 0.0

    # ---- start ---------------------------------------------------------

    def start(self, on_progress: OnProgress, on_load: OnLoad) -> StartTimes:
        """Place, load and connect all stages, or raise StartupError with the reason."""
        began_s = time.monotonic()
        self._start_deadline()
        num = self.config.num_stages
        on_progress(f"starting {num} stages")
        self._placement.launch(self._bootstraps(), self._on_lost)
        start, self._on_load = self._start, on_load
        self._await(start.hellos, "start")
        placed_s = time.monotonic()
        on_progress("loading weights")
        for stage in range(num):
            self._control.send(stage, pb.MasterMessage(setup=self._setup(stage)))
        self._await(start.loaded, "load its weights")
        self.num_blocks = self.config.num_blocks or self._affordable_blocks()
        loaded_s = time.monotonic()
        on_progress("connecting stages")
        self._control.broadcast(pb.MasterMessage(open=self._open()).SerializeToString())
        self._await(start.ready, "connect to its neighbours")
        for status in self.stages:
            status.state = "ready"
        return StartTimes(
            place_s=placed_s - began_s,
            load_s=loaded_s - placed_s,
            connect_s=time.monotonic() - loaded_s,
            fetched_bytes=sum(loaded.fetched_bytes for loaded in start.loaded.values()),
            read_bytes=sum(loaded.read_bytes for loaded in start.loaded.values()),
        )

    def listen(self, tell: Callable[[News], None]) -> None:
        """From now on news go to `tell`, on any thread; those that waited go first."""
        with self._lock:
            self._tell = tell
            while not self._news.empty():
                tell(self._news.get())

    def _bootstraps(self) -> list[StageBootstrap]:
        return [
            StageBootstrap(
                stage=i,
                control_address=self._control.address,
                secret=self._secret,
                log_level=self.config.log.log_level,
                log_format=self.config.log.log_format,
            )
            for i in range(self.config.num_stages)
        ]

    def _start_deadline(self) -> None:
        """Anew: at the start, and whenever weights arrive, of which there may be any amount."""
        self._deadline = time.monotonic() + self.config.start_timeout_s

    def _await(self, answers: Mapping[int, object], what: str) -> None:
        while len(answers) < self.config.num_stages:
            try:
                news = self._news.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                missing = [s.index for s in self.stages if s.index not in answers]
                raise StartupError(
                    f"stages {missing} did not {what} within start_timeout_s = "
                    f"{self.config.start_timeout_s:g} s; raise it, or see their output above"
                ) from None
            self._note(news)

    def _note(self, news: News) -> None:
        if isinstance(news, Lost):
            raise StartupError(f"{self.stages[news.stage]} did not start: {news.why}")
        stage, message = news
        kind = message.WhichOneof("kind")
        if kind == "hello":
            self._note_hello(stage, message.hello)
        elif kind == "loaded":
            self._start.loaded[stage] = message.loaded
            self.stages[stage].device = message.loaded.device
        elif kind == "load_progress":
            self._note_loading(stage, message.load_progress)
        elif kind == "ready":
            self._start.ready[stage] = message.ready
        elif kind == "failure":
            if message.failure.traceback:
                log.error("%s failed:\n%s", self.stages[stage], message.failure.traceback)
            raise StartupError(f"{self.stages[stage]} did not start: {message.failure.message}")

    def _note_loading(self, stage: int, progress: pb.LoadProgress) -> None:
        """All stages load at once: what is told are their sums."""
        self._start_deadline()
        self._start.loading[stage] = progress
        stages = self._start.loading.values()
        self._on_load(sum(s.done_bytes for s in stages), sum(s.total_bytes for s in stages))

    def _note_hello(self, stage: int, hello: pb.Hello) -> None:
        self._start.hellos[stage] = hello
        status = self.stages[stage]
        status.node, status.pid = hello.host or hello.node, hello.pid
        status.actor_id, status.versions = hello.actor_id, hello.versions

    def _setup(self, stage: int) -> pb.Setup:
        config = self.config
        layers = config.layers[stage]
        return pb.Setup(
            stage=stage,
            num_stages=config.num_stages,
            model=config.model,
            load_format=config.load_format,
            first_layer=layers.start,
            end_layer=layers.stop,
            dtype=config.dtype,
            device=config.device,
            link=config.link,
            num_threads=config.num_threads,
            block_size=config.block_size,
            inflight=config.inflight,
            num_token_ids=config.num_token_ids,
        )

    def _affordable_blocks(self) -> int:
        """The same number on every stage: what the one with the least room can hold."""
        config = self.config
        room = {
            stage: int(loaded.free_bytes * config.gpu_memory_share)
            // (config.layer_block_bytes * len(config.layers[stage]))
            for stage, loaded in self._start.loaded.items()
        }
        tightest = min(room, key=room.__getitem__)
        if room[tightest] < 1:
            free_bytes = self._start.loaded[tightest].free_bytes
            raise StartupError(
                f"{self.stages[tightest]} has {free_bytes / 2**20:.0f} MiB free beside its "
                "weights, which hold no KV block: take more stages"
            )
        return min(room[tightest], config.max_blocks)

    def _open(self) -> pb.Open:
        return pb.Open(
            epoch=self.epoch,
            store_address=self._start.loaded[0].store_address,
            num_blocks=self.num_blocks,
            link_timeout_s=self.config.link_timeout_s,
        )

    # ---- running -------------------------------------------------------

    def send(self, plan: Plan) -> int:
        """Ship a plan to all stages; returns the bytes that each gets."""
        payload = encode_plan(plan)
        self._control.broadcast(payload)
        return len(payload)

    def ping(self, nonce: int) -> None:
        self._control.broadcast(pb.MasterMessage(ping=pb.Ping(nonce=nonce)).SerializeToString())

    def close(self) -> None:
        """Ask stages to leave, then make sure; any number of times."""
        with self._lock:
            self._tell = lambda news: None
        self._control.broadcast(pb.MasterMessage(close=pb.Close()).SerializeToString())
        self._control.close(grace_s=1.0)
        self._placement.close()

    def _on_lost(self, stage: int, why: str) -> None:
        self._on_news(Lost(stage=stage, why=why))

    def _on_news(self, news: News) -> None:
        with self._lock:
            self._tell(news)
