"""Thousands of requests of every kind through a whole server, and what is left behind afterwards.

A server and its clients in this process, on a pipeline of its own. A quarter of the requests
warms everything up; what grows from then on, from one idle moment to the next, is a leak.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

from orca_dist.bench.jobs import ordinary_ids
from orca_dist.bench.visits import Manner, Sizes, Visit, make_visits
from orca_dist.client import AsyncClient
from orca_dist.config import EngineConfig, LogConfig, ServerConfig
from orca_dist.engine.engine import Engine
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.errors import (
    ConfigError,
    InvalidRequest,
    OrcaError,
    RequestCancelled,
    UnknownRequest,
)
from orca_dist.params import SamplingParams
from orca_dist.server import Server
from orca_dist.text import ChatTemplate, Tokenizer

IDLE_STAGE = "orca_dist.stage.idle"
GRPC_POOL = "event_engine"  # what its threads are called
WARM_UP_SHARE = 0.25
NUM_CONNECTIONS = 8
IDLE_LIMIT_S = 30.0  # for calls that are on their way out
STAGES_LIMIT_S = 5.0  # for the last plan to reach every stage
ASK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """Shares are of all requests; lengths are the longest ones, in tokens."""

    requests: int
    cancel_share: float
    bad_share: float
    prompt_len: int
    out: int
    clients: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of the server's process and then of each stage's."""

    rss_mb: tuple[float, ...]
    threads: tuple[int, ...]  # without gRPC's pool
    files: tuple[int, ...]  # open ones, sockets among them


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """How requests ended, and what is left: `leaked_entries` are of all tables that have one for
    a request, in the server, its engine and the stages. `warm` and `end` are of idle moments."""

    requests: int
    answered: int
    cancelled: int
    refused: int
    failed: int
    preempted: int
    leaked_blocks: int
    leaked_entries: int
    warm: Footprint
    end: Footprint

    @property
    def rss_growth_mb(self) -> float:
        """Of the process that grew most."""
        return max(_growths(self.warm.rss_mb, self.end.rss_mb))

    @property
    def is_clean(self) -> bool:
        """Nothing failed and nothing is left; memory apart, which has a limit, not a count."""
        leaked = self.leaked_blocks + self.leaked_entries + self.leaked_threads + self.leaked_files
        return not (self.failed or leaked)

    @property
    def leaked_threads(self) -> int:
        return round(max(0, *_growths(self.warm.threads, self.end.threads)))

    @property
    def leaked_files(self) -> int:
        return round(max(0, *_growths(self.warm.files, self.end.files)))


def _growths(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(before, after, strict=True)]


class SoakRun:
    """Sends visits to a server, `clients` at once."""

    def __init__(
        self, address: str, clients: int, on_end: Callable[[int], None] = lambda num_ended: None
    ) -> None:
        self.ends: Counter[str] = Counter()  # answered, cancelled, refused, failed
        self.num_sent = 0
        self._clients = clients
        self._connections = [AsyncClient(address) for _ in range(NUM_CONNECTIONS)]
        self._on_end = on_end

    async def visit_all(self, visits: Iterator[Visit]) -> None:
        """Returns once all have ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                client = self._connections[number % NUM_CONNECTIONS]
                group.create_task(self._one_after_the_other(client, visits))

    async def close(self) -> None:
        for client in self._connections:
            await client.close()

    async def _one_after_the_other(self, client: AsyncClient, visits: Iterator[Visit]) -> None:
        for visit in visits:
            self.num_sent += 1
            self.ends[await _end_of(client, f"visit-{self.num_sent}", visit)] += 1
            self._on_end(self.ends.total())


async def _end_of(client: AsyncClient, name: str, visit: Visit) -> str:
    """How the visit ended; `failed` is what must not be."""
    try:
        async with _leaving(client, name, visit):
            num = await _num_tokens(client, name, visit)
    except InvalidRequest:
        return "refused" if visit.manner is Manner.BAD else "failed"
    except (TimeoutError, RequestCancelled):
        return "cancelled"
    except OrcaError:
        return "failed"
    if visit.manner is Manner.BAD:
        return "failed"
    if num == visit.params.max_tokens:
        return "answered"
    return "cancelled" if visit.manner is Manner.LEAVE_AFTER_TOKENS else "failed"


async def _num_tokens(client: AsyncClient, name: str, visit: Visit) -> int:
    """Of its answer, as far as it waits for it."""
    num = 0
    stream = client.stream(visit.prompt, visit.params, request_id=name, priority=visit.priority)
    async with aclosing(stream) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            num += len(chunk.token_ids)
            if visit.manner is Manner.LEAVE_AFTER_TOKENS and num >= visit.num_tokens:
                break
    return num


@asynccontextmanager
async def _leaving(client: AsyncClient, name: str, visit: Visit) -> AsyncIterator[None]:
    """Ends the block at the visit's time, if that is how it leaves."""
    if visit.manner is Manner.LEAVE_AFTER_TIME:
        async with asyncio.timeout(visit.after_s):
            yield
    elif visit.manner is Manner.ABORT:
        abort = asyncio.create_task(_abort(client, name, visit.after_s))
        try:
            yield
        finally:
            abort.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await abort
    else:
        yield


async def _abort(client: AsyncClient, name: str, after_s: float) -> None:
    await asyncio.sleep(after_s)
    with contextlib.suppress(UnknownRequest):  # it has not begun, or has ended
        await client.abort(name)


def start_engine(
    model: Path, config: EngineConfig, log_config: LogConfig, *, compute: bool
) -> Engine:
    """Raises what Engine.start raises."""
    placement = None if compute else LocalPlacement(IDLE_STAGE)
    num_token_ids = Tokenizer.load(model).num_ids
    return Engine.start(
        model, config, num_token_ids=num_token_ids, log_config=log_config, placement=placement
    )


async def run_soak(
    engine: Engine,
    model: Path,
    config: SoakConfig,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SoakResult:
    """`model` is the engine's folder; `on_progress` hears how many of how many requests ended."""
    async with Server(
        engine,
        Tokenizer.load(model),
        ChatTemplate.load(model),
        ServerConfig(port=0),
        max_queue=engine.config.max_queue,
        max_queue_tokens=engine.config.max_queue_tokens,
    ) as server:
        run = SoakRun(server.address, config.clients, lambda num: on_progress(num, config.requests))
        visits = make_visits(
            config.requests,
            _sizes(engine, config),
            cancel_share=config.cancel_share,
            bad_share=config.bad_share,
            seed=config.seed,
        )
        try:
            await run.visit_all(islice(visits, int(config.requests * WARM_UP_SHARE)))
            warm = await _idle_footprint(engine, server)
            await run.visit_all(visits)
            end = await _idle_footprint(engine, server)
            return await _result(engine, server, run, warm, end)
        finally:
            await run.close()


async def _idle_footprint(engine: Engine, server: Server) -> Footprint:
    """Once nothing is open or on its way any more: the last request's end is the end of all."""
    async with asyncio.timeout(IDLE_LIMIT_S):
        await server.wait_idle()
    async with AsyncClient(server.address) as client:
        await client.generate([0], SamplingParams(max_tokens=1))
    await asyncio.to_thread(engine.flush_trace)
    gc.collect()
    processes = [psutil.Process(), *(psutil.Process(s.pid) for s in engine.info().stages)]
    return Footprint(
        rss_mb=tuple(process.memory_info().rss / 1e6 for process in processes),
        threads=tuple(_num_threads(process) for process in processes),
        files=tuple(process.num_fds() for process in processes),
    )


def _num_threads(process: psutil.Process) -> int:
    """Without those of gRPC's pool, which come and go with its load."""
    names = [_name(task) for task in Path(f"/proc/{process.pid}/task").glob("*/comm")]
    return sum(name != GRPC_POOL for name in names) or process.num_threads()


def _name(task: Path) -> str:
    try:
        return task.read_text(encoding="utf-8").strip()
    except OSError:  # it ended meanwhile
        return GRPC_POOL


async def _result(
    engine: Engine, server: Server, run: SoakRun, warm: Footprint, end: Footprint
) -> SoakResult:
    load = engine.load()
    return SoakResult(
        requests=run.ends.total(),
        answered=run.ends["answered"],
        cancelled=run.ends["cancelled"],
        refused=run.ends["refused"],
        failed=run.ends["failed"],
        preempted=load.preempted,
        leaked_blocks=-(-load.used_slots // engine.config.block_size),
        leaked_entries=load.entries + server.num_entries + await _left_at_stages(engine),
        warm=warm,
        end=end,
    )


async def _left_at_stages(engine: Engine) -> int:
    """Requests in the stages' tables; asked again while the last drop may be on its way."""
    deadline_s = time.monotonic() + STAGES_LIMIT_S
    while True:
        await asyncio.to_thread(engine.flush_trace)
        left = sum(stage.num_requests for stage in engine.info().stages)
        if not left or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(ASK_AGAIN_S)


def _sizes(engine: Engine, config: SoakConfig) -> Sizes:
    limit = min(engine.max_model_len, engine.kv_tokens)
    if config.prompt_len + config.out > limit:
        raise ConfigError(
            f"prompt_len = {config.prompt_len} and out = {config.out}: together more than the "
            f"{limit} tokens that a request may have here"
        )
    return Sizes(
        prompt_len=config.prompt_len,
        out=config.out,
        ids=ordinary_ids(engine.spec.vocab_size),
        max_model_len=limit,
    )
