"""`orca-dist serve`: port, engine, server, in this order; and down again on a signal or a loss."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.interrupts import handling
from orca_dist.cli.output import results_only
from orca_dist.cli.settings import API_KEYS_VARIABLE, DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig, ServerConfig
from orca_dist.errors import PipelineLost
from orca_dist.logs import Origin, set_up_logging

if TYPE_CHECKING:
    from orca_dist.server import Server

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Start the stages and serve them over gRPC, until a signal comes or the pipeline is lost.

    Prints `ready HOST:PORT` on stdout once it answers.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder or id of the Hub (org/name); or the default model, which is fetched once."""
    config: Path | None = None
    """YAML file of settings, keys as the flags below; flags win over it."""
    engine: OmitArgPrefixes[EngineConfig]
    server: OmitArgPrefixes[ServerConfig]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        """Returns 130 or 143 after a signal; raises PipelineLost and what start-up raises."""
        self.engine.check()
        self.server.check()
        set_up_logging(self.log, Origin())
        with results_only() as results, asyncio.Runner() as runner:
            return _serve(self, runner, results)


def _serve(command: Serve, runner: asyncio.Runner, results: TextIO) -> int:
    from orca_dist.cli.serving import ServedModel, make_server, running_engine
    from orca_dist.llm import resolve_model
    from orca_dist.server import listen

    api_keys = os.environ.pop(API_KEYS_VARIABLE, "")  # no stage is to inherit them
    listener = runner.run(listen(command.server, api_keys))
    try:
        model = ServedModel.load(resolve_model(command.model, command.engine))
        with running_engine(model, command.engine, command.log) as engine:
            server = make_server(
                engine,
                model,
                command.server,
                max_queue=command.engine.max_queue,
                max_queue_tokens=command.engine.max_queue_tokens,
                listener=listener,
            )
            return runner.run(_until_the_end(server, command.server.drain_s, results))
    finally:
        runner.run(listener.server.stop(None))


async def _until_the_end(server: Server, drain_s: float, results: TextIO) -> int:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(signals.put_nowait, signum)

    with handling(on_signal):
        async with server:
            print(f"ready {server.address}", file=results, flush=True)
            signalled = asyncio.ensure_future(signals.get())
            end = await _first(signalled, asyncio.ensure_future(server.wait_lost()))
            if isinstance(end, PipelineLost):
                raise end
            log.info(
                "%s: shutting down; running answers have %g s to end, a second signal ends them",
                signal.Signals(end).name,
                drain_s,
            )
            await _stop(server, drain_s, signals)
            return 128 + end


async def _stop(server: Server, drain_s: float, signals: asyncio.Queue[int]) -> None:
    """Returns once all calls have ended: in their time, or at once after one more signal."""
    draining = asyncio.ensure_future(server.stop(drain_s))
    hurry = asyncio.ensure_future(signals.get())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if hurry.done():
        await server.stop()
    hurry.cancel()
    await draining


async def _first(
    signalled: asyncio.Future[int], lost: asyncio.Future[PipelineLost]
) -> int | PipelineLost:
    ends: set[asyncio.Future[Any]] = {signalled, lost}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        lost.cancel()
        return signalled.result()
    return lost.result()
