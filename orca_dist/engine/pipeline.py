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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from orca_dist.bootstrap import StageBootstrap
from orca_dist.core import Plan
from orca_dist.engine.control import ControlPlane
from orca_dist.engine.kv_size import StageRoom, affordable_blocks, check_blocks
from orca_dist.engine.stages import (
    Lost,
    News,
    OnDeath,
    OnLoad,
    OnProgress,
    Patrol,
    PipelineConfig,
    Placement,
    StageLost,
    StageStatus,
    StartTimes,
)
from orca_dist.engine.wire import encode_plan
from orca_dist.errors import StartupError
from orca_dist.proto.v1 import control_pb2 as pb
from orca_dist.versions import software_versions

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
OF_AN_EPOCH = frozenset({"ready", "result", "failure"})  # else of the stage, or of its load


@dataclass(slots=True)
class _Start:
    """How far each stage has come: the first three of its life, `ready` of this epoch."""

    hellos: dict[int, pb.Hello] = field(default_factory=dict)
    loaded: dict[int, pb.Loaded] = field(default_factory=dict)
    loading: dict[int, pb.LoadProgress] = field(default_factory=dict)
    ready: dict[int, pb.Ready] = field(default_factory=dict)
    set_up: set[int] = field(default_factory=set)

    def forget(self, stage: int) -> None:
        """A new one takes its place."""
        self.set_up.discard(stage)
        for answers in (self.hellos, self.loaded, self.loading):
            answers.pop(stage, None)


class Pipeline:
    """start() returns when every link has carried a dummy tensor; then plans may be sent.

    reopen() begins a new epoch, with other stages in the place of lost ones.
    """

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
        self._lives = [0] * config.num_stages
        self._on_load: OnLoad = lambda done, total: None
        self._patrol: Patrol | None = None
        self._given_up = threading.Event()
        self._control = ControlPlane(
            host=placement.control_host,
            secret=(secret := secrets.token_hex(16)),
            num_stages=config.num_stages,
            on_message=lambda stage, message: self._on_news((stage, message)),
            on_broken=lambda stage, why: self._teller(self._lives[stage])(stage, why),
        )
        self._secret = secret
        self._versions = software_versions()
        self._deadline = self._placed_s = 0.0

    # ---- start ---------------------------------------------------------

    def start(self, on_progress: OnProgress, on_load: OnLoad) -> StartTimes:
        """Place, load and connect all stages, or raise StartupError with the reason."""
        began_s = time.monotonic()
        self._start_deadline()
        num = self.config.num_stages
        self._on_load = on_load
        on_progress(f"starting {num} stages")
        bootstraps = [self._bootstrap(stage) for stage in range(num)]
        self._placement.launch(bootstraps, self._teller(0))
        self._load(on_progress)
        self.num_blocks = self._settled_blocks()
        loaded_s = time.monotonic()
        on_progress("connecting stages")
        self._connect()
        return StartTimes(
            place_s=self._placed_s - began_s,
            load_s=loaded_s - self._placed_s,
            connect_s=time.monotonic() - loaded_s,
            fetched_bytes=sum(loaded.fetched_bytes for loaded in self._start.loaded.values()),
            read_bytes=sum(loaded.read_bytes for loaded in self._start.loaded.values()),
        )

    def reopen(self, lost: Collection[int], deadline: float, patrol: Patrol) -> None:
        """A new epoch: `lost` stages are replaced, the others keep their weights.

        Raises StageLost or LinkBroken where a stage is lost meanwhile, and it may be tried again;
        StartupError past the deadline.
        """
        self.hold()
        with self._lock:
            self.epoch += 1
        self._on_load = lambda done, total: None
        self._patrol = patrol
        self._deadline = deadline
        for stage in lost:
            self._replace(stage)
        try:
            self._load(lambda text: None)
            self._connect()
        finally:
            self._patrol = None

    def last_input_seq(self, stage: int) -> int:
        """The last plan of earlier epochs whose input the stage had, as it said in this one."""
        return self._start.ready[stage].last_seq

    def give_up(self) -> None:
        """A reopen() that is going on ends with StartupError."""
        self._given_up.set()

    def _replace(self, stage: int) -> None:
        self._start.forget(stage)
        self.stages[stage].state = "starting"
        self._control.expect_anew(stage)  # first: its old stream's end is not the new one's loss
        self._lives[stage] += 1
        self._drop_messages(stage)
        self._placement.replace(self._bootstrap(stage), self._teller(self._lives[stage]))

    def _drop_messages(self, stage: int) -> None:
        """What it said before it was lost is not its replacement's word."""
        with self._lock:
            waiting = [self._news.get() for _ in range(self._news.qsize())]
            for news in waiting:
                if isinstance(news, Lost) or news[0] != stage:
                    self._news.put(news)

    def _load(self, on_progress: OnProgress) -> None:
        """Every stage says hello, and reads its weights unless it has them."""
        start = self._start
        self._await(start.hellos, "start")
        self._placed_s = time.monotonic()
        on_progress("loading weights")
        for stage in start.hellos.keys() - start.set_up:
            self._control.send(stage, pb.MasterMessage(setup=self._setup(stage)))
            start.set_up.add(stage)
        self._await(start.loaded, "load its weights")

    def _connect(self) -> None:
        self._start.ready.clear()
        self._control.broadcast(pb.MasterMessage(open=self._open()).SerializeToString())
        self._await(self._start.ready, "connect to its neighbours")
        for status in self.stages:
            status.state = "ready"

    def listen(self, tell: Callable[[News], None]) -> None:
        """From now on news go to `tell`, on any thread; those that waited go first."""
        with self._lock:
            self._tell = tell
            while not self._news.empty():
                if self._is_current(news := self._news.get()):
                    tell(news)

    def hold(self) -> None:
        """From now on news wait, until somebody listens or reopen() takes them."""
        with self._lock:
            self._tell = self._news.put

    def pass_back(self, news: News) -> None:
        """News that came before hold(), and are reopen()'s to hear."""
        self._on_news(news)

    def _bootstrap(self, stage: int) -> StageBootstrap:
        return StageBootstrap(
            stage=stage,
            control_address=self._control.address,
            secret=self._secret,
            log_level=self.config.log.log_level,
            log_format=self.config.log.log_format,
        )

    def _start_deadline(self) -> None:
        """Anew: at the start, and whenever weights arrive, of which there may be any amount."""
        self._deadline = time.monotonic() + self.config.start_timeout_s

    def _await(self, answers: Mapping[int, object], what: str) -> None:
        while len(answers) < self.config.num_stages:
            left_s = max(0.0, self._deadline - time.monotonic())
            try:
                self._note(self._news.get(timeout=min(left_s, WATCH_INTERVAL_S)))
            except queue.Empty:
                if not left_s:
                    self._raise_missing(answers, what)
            if self._given_up.is_set():
                raise StartupError("the engine is closing")
            if self._patrol:
                self._patrol.watch(self._start.hellos)

    def _raise_missing(self, answers: Mapping[int, object], what: str) -> None:
        missing = [status.index for status in self.stages if status.index not in answers]
        why = self._placement.why_missing(missing)
        if self._patrol:  # a recovery, which has a limit of its own to name
            why = why or "see their output above"
            raise StartupError(f"stages {missing} did not {what}: {why}")
        raise StartupError(
            f"stages {missing} did not {what} within start_timeout_s = "
            f"{self.config.start_timeout_s:g} s: {why or 'raise it, or see their output above'}"
        )

    def _note(self, news: News) -> None:
        if not self._is_current(news):
            return
        if isinstance(news, Lost):
            raise StageLost(self.stages[news.stage], news.why)
        stage, message = news
        kind = message.WhichOneof("kind")
        if kind == "hello":
            self._note_hello(stage, message.hello)
        elif kind == "loaded":
            self._start.loaded[stage] = message.loaded
            self._note_loaded(self.stages[stage], message.loaded)
        elif kind == "load_progress":
            self._note_loading(stage, message.load_progress)
        elif kind == "ready":
            self._start.ready[stage] = message.ready
        elif kind == "pong" and self._patrol:
            self._patrol.beat(stage, message.pong)
        elif kind == "failure":
            self._note_failure(self.stages[stage], message.failure)

    def _note_failure(self, status: StageStatus, failure: pb.Failure) -> None:
        """While a pipeline starts, a link fails because one of its ends does: that is told too."""
        if failure.link and self._patrol:
            self._patrol.link_broke(str(status), failure.message)
            return
        if failure.traceback:
            log.error("%s failed:\n%s", status, failure.traceback)
        raise StageLost(status, failure.message)

    def _note_loading(self, stage: int, progress: pb.LoadProgress) -> None:
        """All stages load at once: what is told are their sums."""
        if not self._patrol:  # a recovery has its own limit
            self._start_deadline()
        self._start.loading[stage] = progress
        stages = self._start.loading.values()
        self._on_load(sum(s.done_bytes for s in stages), sum(s.total_bytes for s in stages))

    def _note_hello(self, stage: int, hello: pb.Hello) -> None:
        self._start.hellos[stage] = hello
        status = self.stages[stage]
        status.node, status.pid = hello.host or hello.node, hello.pid
        status.actor_id, status.versions = hello.actor_id, hello.versions
        status.gpus = tuple(hello.gpus)
        if hello.versions != self._versions:
            raise StartupError(
                f"{status} runs {hello.versions}, and the engine master {self._versions}: install "
                "the same on every node"
            )

    def _note_loaded(self, status: StageStatus, loaded: pb.Loaded) -> None:
        """Every stage on Ray sees its GPU as the first: only the node's own ids tell them apart."""
        ids = f" (GPU {', '.join(status.gpus)})" if status.gpus else ""
        status.device = loaded.device + ids

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
            graph_rows=config.graph_rows,
            attention_backend=config.attention_backend,
        )

    def _settled_blocks(self) -> int:
        """As asked, where that fits; else what the tightest memory can hold."""
        config, rooms = self.config, [self._room(stage) for stage in sorted(self._start.loaded)]
        if config.num_blocks is None:
            return affordable_blocks(rooms, config.memory_share, config.max_blocks)
        check_blocks(rooms, config.num_blocks, config.block_size)
        return config.num_blocks

    def _room(self, stage: int) -> StageRoom:
        """A GPU is a stage's own, and its free memory is beside the weights; RAM is shared."""
        config, loaded = self.config, self._start.loaded[stage]
        own = not loaded.node_bytes
        node = self.stages[stage].node or "unknown"
        return StageRoom(
            stage=stage,
            memory=f"{loaded.device} of stage {stage}" if own else f"node {node}",
            total_bytes=loaded.free_bytes + loaded.weight_bytes if own else loaded.node_bytes,
            weight_bytes=loaded.weight_bytes,
            activation_bytes=config.activation_bytes[stage],
            block_bytes=config.layer_block_bytes * len(config.layers[stage]),
        )

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

    def _teller(self, life: int) -> OnDeath:
        """Passes on the loss of a stage that has been replaced `life` times."""
        return lambda stage, why: self._on_news(Lost(stage=stage, why=why, life=life))

    def _on_news(self, news: News) -> None:
        with self._lock:
            if self._is_current(news):
                self._tell(news)

    def _is_current(self, news: News) -> bool:
        """What is told of a stage that was replaced, or of an earlier epoch, is too late."""
        if isinstance(news, Lost):
            return news.life == self._lives[news.stage]
        message = news[1]
        late = message.epoch not in (0, self.epoch)
        return not (late and message.WhichOneof("kind") in OF_AN_EPOCH)
