"""`orca-dist serve`: port, engine, server, in this order; and down again on a signal or a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.interrupts import handling
from orca_dist.cli.output import results_only
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig, ServerConfig
from orca_dist.errors import PipelineLost
from orca_dist.logs import Origin, set_up_logging

if TYPE_CHECKING:
    from orca_dist.server import Server

DRAIN_S = 2.0  # for running answers to end by themselves
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Start the stages and serve them over gRPC, until a signal comes or a stage is lost.

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
        set_up_logging(self.log, Origin())
        with results_only() as results, asyncio.Runner() as runner:
            return _serve(self, runner, results)


def _serve(command: Serve, runner: asyncio.Runner, results: TextIO) -> int:
    from orca_dist.cli.serving import ServedModel, make_server, running_engine
    from orca_dist.llm import resolve_model
    from orca_dist.server import listen

    listener = runner.run(listen(command.server))
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
            return runner.run(_until_the_end(server, results))
    finally:
        runner.run(listener.server.stop(None))


async def _until_the_end(server: Server, results: TextIO) -> int:
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(_settle, signalled, signum)

    with handling(on_signal):
        async with server:
            print(f"ready {server.address}", file=results, flush=True)
            end = await _first(signalled, asyncio.ensure_future(server.wait_lost()))
            if isinstance(end, PipelineLost):
                raise end
            log.info("%s: shutting down", signal.Signals(end).name)
            await server.stop(DRAIN_S)
            return 128 + end


async def _first(
    signalled: asyncio.Future[int], lost: asyncio.Future[PipelineLost]
) -> int | PipelineLost:
    ends: set[asyncio.Future[Any]] = {signalled, lost}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        lost.cancel()
        return signalled.result()
    return lost.result()


def _settle(future: asyncio.Future[int], value: int) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        future.set_result(value)
