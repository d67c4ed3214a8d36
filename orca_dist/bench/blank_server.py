"""A real server over stages that compute nothing, and what its threads cost in a while.

A process of its own, so that its CPU time is its alone: bench.frontend starts it with a
BlankServer as JSON on the first line of stdin. It prints its address; then a line
`start` begins a window and is answered by `started`, a line `stop` ends it and is
answered by its Spent as JSON. The end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orca_dist.config import EngineConfig, LogConfig, LogLevel, ServerConfig
from orca_dist.engine.engine import Engine
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.errors import OrcaError
from orca_dist.logs import Origin, set_up_logging
from orca_dist.metrics.trace import PlanTrace
from orca_dist.server import Server
from orca_dist.text import ChatTemplate, Tokenizer

STAGE_MODULE, WAIT_VARIABLE = "orca_dist.stage.blank", "BLANK_STAGE_WAIT_S"
QUIET = LogConfig(log_level=LogLevel.WARNING)
FRONT, MASTER = "MainThread", "engine-master"
CONTROL = ("control-stream", "(_read)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlankServer:
    """What to serve: a model's tokenizer and sizes, room for `streams` requests of `max_len`."""

    model: str
    stages: int
    streams: int
    max_len: int
    wait_s: float

    def engine_config(self) -> EngineConfig:
        """All streams may run, and none is ever preempted."""
        return EngineConfig(
            stages=self.stages,
            launcher="local",  # type: ignore[arg-type]
            device="cpu",  # type: ignore[arg-type]
            dtype="float32",  # type: ignore[arg-type]
            max_batch_size=self.streams,
            max_batch_tokens=max(2048, self.streams),
            max_model_len=self.max_len,
            kv_tokens=2 * self.streams * self.max_len,
            max_queue=2 * self.streams,
            recovery="off",  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU seconds since the process began.

    front: the loop of the server, detokenising and gRPC's Python side included. master: the
    engine master's thread. control: the threads of the control streams. grpc: gRPC's own.
    """

    front_s: float
    master_s: float
    control_s: float
    grpc_s: float

    @property
    def total_s(self) -> float:
        return self.front_s + self.master_s + self.control_s + self.grpc_s

    def since(self, before: CpuTimes) -> CpuTimes:
        """What was spent after `before`."""
        return CpuTimes(
            front_s=self.front_s - before.front_s,
            master_s=self.master_s - before.master_s,
            control_s=self.control_s - before.control_s,
            grpc_s=self.grpc_s - before.grpc_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A window: how long it was, the iterations that returned in it, their tokens, the CPU time."""

    wall_s: float
    iterations: int
    tokens: int
    cpu: CpuTimes

    @classmethod
    def read(cls, line: str | bytes) -> Spent:
        """As `json.dumps(asdict(spent))` wrote it."""
        document = json.loads(line)
        return cls(**document | {"cpu": CpuTimes(**document["cpu"])})


def cpu_times(names: Mapping[str, float], total_s: float) -> CpuTimes:
    """From the seconds of each Python thread; the rest of `total_s` is gRPC's own threads."""
    front_s, master_s = names.get(FRONT, 0.0), names.get(MASTER, 0.0)
    control_s = sum(seconds for name, seconds in names.items() if any(w in name for w in CONTROL))
    return CpuTimes(
        front_s=front_s,
        master_s=master_s,
        control_s=control_s,
        grpc_s=total_s - front_s - master_s - control_s,
    )


def spent_between(
    plans: Sequence[PlanTrace], since_s: float, until_s: float, cpu: CpuTimes
) -> Spent:
    """Plans count by when they returned."""
    returned = [plan for plan in plans if plan.returned_s and since_s <= plan.returned_s < until_s]
    return Spent(
        wall_s=until_s - since_s,
        iterations=len(returned),
        tokens=sum(plan.num_sampled for plan in returned),
        cpu=cpu,
    )


class Window:
    """start() and stop(): what this process did in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._since_s = 0.0
        self._before = _cpu_now()

    def start(self) -> None:
        self._since_s, self._before = time.time(), _cpu_now()

    def stop(self) -> Spent:
        until_s, cpu = time.time(), _cpu_now().since(self._before)
        self._engine.flush_trace()
        return spent_between(self._engine.trace(), self._since_s, until_s, cpu)


def _cpu_now() -> CpuTimes:
    names: dict[str, float] = {}
    for number, thread in enumerate(threading.enumerate()):
        if thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            name = thread.name if thread.name in (FRONT, MASTER) else f"{thread.name} {number}"
            names[name] = time.clock_gettime(clock)
    return cpu_times(names, time.process_time())


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench's to handle; stdin ends with it
    set_up_logging(QUIET, Origin())
    command = BlankServer(**json.loads(sys.stdin.readline()))
    try:
        return asyncio.run(_serve(command))
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


async def _serve(command: BlankServer) -> int:
    os.environ[WAIT_VARIABLE] = str(command.wait_s)
    folder = Path(command.model)
    tokenizer, config = Tokenizer.load(folder), command.engine_config()
    engine = Engine.start(
        folder,
        config,
        num_token_ids=tokenizer.num_ids,
        on_progress=lambda text: None,
        placement=LocalPlacement(STAGE_MODULE),
    )
    try:
        server = Server(
            engine,
            tokenizer,
            ChatTemplate.load(folder),
            ServerConfig(port=0),
            max_queue=config.max_queue,
            max_queue_tokens=config.max_queue_tokens,
        )
        async with server:
            print(server.address, flush=True)
            await _answer(Window(engine))
    finally:
        engine.close()
    return 0


async def _answer(window: Window) -> None:
    """Until stdin ends."""
    with suppress(BrokenPipeError):  # the bench is gone
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if word == "start":
                window.start()
                print("started", flush=True)
            else:
                spent = await asyncio.to_thread(window.stop)
                print(json.dumps(dataclasses.asdict(spent)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
