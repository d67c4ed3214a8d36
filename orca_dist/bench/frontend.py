"""What the front, the engine master and the control plane cost an iteration.

A real server, in a process of its own, over stages that compute nothing; this process
holds many streams open and reads their tokens. Both processes' CPU times are counted
apart, over a window in which every stream is running: neither the start of the streams
nor their end is in it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from orca_dist.bench.blank_server import BlankServer, Spent
from orca_dist.bench.serve import connected
from orca_dist.client import AsyncClient
from orca_dist.errors import ConfigError, StartupError
from orca_dist.params import SamplingParams

SERVER_MODULE = "orca_dist.bench.blank_server"
PROMPT_LEN, MAX_LEN = 16, 2048
END_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendCost:
    """One point. `_ms` are milliseconds an iteration; all but wall_ms and generator_ms are CPU
    time of the serving process.

    cpu_ms = front_ms + master_ms + control_ms + grpc_ms. batch: requests in an iteration, on
    average. messages: that the generator got an iteration. tpot_s: from token to token of a
    stream, on average.
    """

    stages: int
    streams: int
    iterations: int
    batch: float
    cpu_ms: float
    front_ms: float
    master_ms: float
    control_ms: float
    grpc_ms: float
    generator_ms: float
    wall_ms: float
    messages: float
    tokens_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the generator had in the same window: tokens, messages, and its own CPU seconds."""

    tokens: int
    messages: int
    cpu_s: float


def cost(stages: int, streams: int, spent: Spent, heard: Heard) -> FrontendCost:
    """Raises ConfigError where no iteration or no token came in the window."""
    if not spent.iterations or not heard.tokens:
        raise ConfigError(
            f"duration_s = {spent.wall_s:.1f}: no token of {streams} streams on {stages} stages "
            "came in that time; raise it"
        )
    num, cpu = spent.iterations, spent.cpu
    return FrontendCost(
        stages=stages,
        streams=streams,
        iterations=num,
        batch=spent.tokens / num,
        cpu_ms=1e3 * cpu.total_s / num,
        front_ms=1e3 * cpu.front_s / num,
        master_ms=1e3 * cpu.master_s / num,
        control_ms=1e3 * cpu.control_s / num,
        grpc_ms=1e3 * cpu.grpc_s / num,
        generator_ms=1e3 * heard.cpu_s / num,
        wall_ms=1e3 * spent.wall_s / num,
        messages=heard.messages / num,
        tokens_s=heard.tokens / spent.wall_s,
        tpot_s=streams * spent.wall_s / heard.tokens,
    )


def max_streams(costs: Sequence[FrontendCost], tpot_limit_s: float) -> dict[int, int]:
    """By stages: the most streams of those tried whose tokens came in time; 0: none did."""
    most = dict.fromkeys((each.stages for each in costs), 0)
    for each in costs:
        if each.tpot_s <= tpot_limit_s:
            most[each.stages] = max(most[each.stages], each.streams)
    return most


async def run_frontend(
    model: Path,
    *,
    stages: Sequence[int],
    streams: Sequence[int],
    wait_s: float,
    duration_s: float,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[FrontendCost]:
    """One server after the other, and on each all numbers of streams, each for `duration_s`.

    Raises StartupError where a server does not start, and the OrcaError of a stream that fails.
    """
    total, costs = len(stages) * len(streams), list[FrontendCost]()
    on_progress(0, total)
    for num_stages in stages:
        command = BlankServer(
            model=str(model.resolve()),
            stages=num_stages,
            streams=max(streams),
            max_len=MAX_LEN,
            wait_s=wait_s,
        )
        async with serving(command) as server, connected(server.address) as clients:
            for num_streams in streams:
                spent, heard = await _measured(server, clients, num_streams, duration_s)
                costs.append(cost(num_stages, num_streams, spent, heard))
                on_progress(len(costs), total)
    return costs


class ServerProcess:
    """The blank server's process, from here."""

    def __init__(self, process: Process, address: str) -> None:
        self.address = address
        self._process = process

    async def start_window(self) -> None:
        await self._ask("start")

    async def stop_window(self) -> Spent:
        return Spent.read(await self._ask("stop"))

    async def _ask(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        await self._process.stdin.drain()
        return await _line(self._process)


@asynccontextmanager
async def serving(command: BlankServer) -> AsyncIterator[ServerProcess]:
    """The process, once it answers; it and its stages are gone at the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", SERVER_MODULE),
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(dataclasses.asdict(command)).encode() + b"\n")
        yield ServerProcess(process, await _line(process))
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _line(process: Process) -> str:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise StartupError("the server of the bench has ended; see its output above")
    return line.decode().strip()


class Streams:
    """Open streams, each of which asks again when its answer ends."""

    def __init__(self, clients: Sequence[AsyncClient], num: int) -> None:
        self.tokens = self.messages = 0
        self.all_run = asyncio.Event()
        self._waiting = set(range(num))
        pairs = zip(range(num), itertools.cycle(clients), strict=False)
        self._tasks = [asyncio.create_task(self._run(i, client)) for i, client in pairs]

    async def until(self, awaitable: asyncio.Future[object]) -> None:
        """Returns when that is done; raises what ends a stream before."""
        await asyncio.wait([awaitable, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                awaitable.cancel()
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int, client: AsyncClient) -> None:
        params = SamplingParams(max_tokens=MAX_LEN - PROMPT_LEN, ignore_eos=True)
        for turn in itertools.count():
            prompt = [1 + (index * 7 + turn) % 100, *range(1, PROMPT_LEN)]
            async for chunk in client.stream(prompt, params):
                self.tokens += len(chunk.token_ids)
                self.messages += 1
                self._waiting.discard(index)
                if not self._waiting:
                    self.all_run.set()


async def _measured(
    server: ServerProcess, clients: Sequence[AsyncClient], num: int, duration_s: float
) -> tuple[Spent, Heard]:
    streams = Streams(clients, num)
    try:
        await streams.until(asyncio.ensure_future(streams.all_run.wait()))
        await server.start_window()
        tokens, messages, cpu_s = streams.tokens, streams.messages, time.process_time()
        await streams.until(asyncio.ensure_future(asyncio.sleep(duration_s)))
        heard = Heard(
            tokens=streams.tokens - tokens,
            messages=streams.messages - messages,
            cpu_s=time.process_time() - cpu_s,
        )
        return await server.stop_window(), heard
    finally:
        with suppress(asyncio.CancelledError):
            await streams.close()
