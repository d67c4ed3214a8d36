"""A whole server around a started engine: streams, services, health, and their end.

Runs in one asyncio loop, in a command as in a test. The engine is its owner's:
it is attached to, never closed, here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from orca_dist.config import ServerConfig
from orca_dist.engine.streams import EngineStreams
from orca_dist.errors import PipelineLost, ServerClosing
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.server import convert
from orca_dist.server.health import Health
from orca_dist.server.listener import Listener, listen
from orca_dist.server.ports import ServedEngine
from orca_dist.server.prompts import ChatRenderer, PromptReader
from orca_dist.server.servicer import SERVICE, GenerateServicer, handlers
from orca_dist.server.waiting import wait_at_most
from orca_dist.text import Detokenizer, Tokenizer

REFLECTED = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
STATUS_GRACE_S = 1.0  # for statuses on their way when the server stops

log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """`async with Server(...) as server:` serves at `server.address` until the block ends."""

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: Tokenizer,
        chat: ChatRenderer,
        config: ServerConfig,
        *,
        max_queue: int,
        max_queue_tokens: int,
        listener: Listener | None = None,
    ) -> None:
        """`listener`: a port taken earlier; by default `start` takes the one of `config`."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._listener = listener
        self._chat = chat
        self._prompts = PromptReader(tokenizer, chat)
        self._max_queue = max_queue
        self._max_queue_tokens = max_queue_tokens
        self._health = Health()
        self._lost: asyncio.Future[PipelineLost] | None = None
        self._farewell: asyncio.Task[None] | None = None
        self._paused = False
        self._pausing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Cancelled meanwhile, it comes up whole first: half a gRPC server can't be stopped."""
        starting = asyncio.ensure_future(self.start())
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """HOST:PORT, once started."""
        assert self._listener is not None, "start() first"
        return self._listener.address

    @property
    def num_entries(self) -> int:
        """In all tables that have one for a call, once started: 0 when nobody calls."""
        return self._servicer.num_entries + self._streams.num_entries

    async def wait_idle(self) -> None:
        """Returns when no call is open."""
        await self._servicer.wait_idle()

    async def start(self) -> None:
        """Attach to the engine and serve; raises StartupError for a port that can't be had."""
        loop = asyncio.get_running_loop()
        self._listener = self._listener or await listen(self._config)
        self._lost = loop.create_future()
        self._streams = self._make_streams()
        self._servicer = self._make_servicer()
        self._engine.attach(
            deliver=_from_thread(loop, self._streams.deliver),
            lose=_from_thread(loop, self._lose),
            pause=_from_thread(loop, self._pause),
        )
        server = self._listener.server
        server.add_generic_rpc_handlers((handlers(self._servicer),))
        await self._health.join(server)
        reflection.enable_server_reflection(REFLECTED, server)
        await server.start()
        await self._health.set(serving=True)

    async def wait_lost(self) -> PipelineLost:
        """Returns when the pipeline is lost, if ever."""
        assert self._lost is not None, "start() first"
        return await asyncio.shield(self._lost)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new calls, let those open end within `grace_s`, end the rest with UNAVAILABLE.

        May be called again meanwhile: the shortest grace counts.
        """
        assert self._listener is not None, "start() first"
        closing = self._loss() or ServerClosing("the server is shutting down")
        self._servicer.refuse(closing)
        await self._health_off()
        await self._servicer.drain(closing, grace_s)
        await self._listener.server.stop(STATUS_GRACE_S)

    def _lose(self, error: PipelineLost) -> None:
        """The pipeline is gone: every call, open or new, ends with `error`."""
        assert self._lost is not None
        if not self._lost.done():
            self._lost.set_result(error)
            self._servicer.refuse(error)
            self._streams.lose(error)
            self._farewell = asyncio.ensure_future(self._health_off())

    def _pause(self, paused: bool) -> None:
        """A recovery: running answers wait, new calls queue up, and health tells the balancers."""
        self._paused = paused
        if not self._pausing or self._pausing.done():
            self._pausing = asyncio.ensure_future(self._tell_pause())

    async def _tell_pause(self) -> None:
        """The last word counts, whatever came while a slow watcher was told of the first."""
        told: bool | None = None
        while told is not self._paused and not self._loss():
            told = self._paused
            await wait_at_most(self._health.set(serving=not told), STATUS_GRACE_S)

    def _loss(self) -> PipelineLost | None:
        return self._lost.result() if self._lost and self._lost.done() else None

    async def _health_off(self) -> None:
        """Bounded: a watcher that doesn't read can hold the health service back."""
        await wait_at_most(self._health.set(serving=False), STATUS_GRACE_S)

    def _make_streams(self) -> EngineStreams:
        spec = self._engine.spec
        return EngineStreams(
            master=self._engine,
            vocab_size=spec.vocab_size,
            max_model_len=self._engine.max_model_len,
            kv_tokens=self._engine.kv_tokens,
            eos_token_ids=frozenset(spec.eos_token_ids) | frozenset(self._tokenizer.eos_token_ids),
            max_queue=self._max_queue,
            max_queue_tokens=self._max_queue_tokens,
        )

    def _make_servicer(self) -> GenerateServicer:
        assert self._listener is not None, "start() takes it first"
        return GenerateServicer(
            streams=self._streams,
            callers=self._listener.callers,
            prompts=self._prompts,
            assembler=lambda: Detokenizer(self._tokenizer),
            info=self._info,
            model=self._model_info,
        )

    def _info(self) -> pb.ServerInfoResponse:
        return convert.server_info(self._engine.info(), model=self._name())

    def _model_info(self) -> pb.ModelInfoResponse:
        return convert.model_info(
            name=self._name(),
            vocab_size=self._engine.spec.vocab_size,
            max_model_len=self._engine.max_model_len,
            eos_token_ids=self._streams.eos_token_ids,
            chat=self._chat.available,
        )

    def _name(self) -> str:
        return self._config.served_model_name or self._engine.info().name


def _from_thread(
    loop: asyncio.AbstractEventLoop, callback: Callable[[T], None]
) -> Callable[[T], None]:
    """`callback` for use from the engine's thread; does nothing once the loop has closed."""

    def call(argument: T) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, argument)

    return call
