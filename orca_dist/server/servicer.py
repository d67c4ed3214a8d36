"""orca.v1.GenerateService: one coroutine per call, from request to status.

A call's stream is given back in a `finally`, whatever ended the call: an answer,
a client that left, a deadline, an error. Requests arrive as bytes, so that a
malformed one gets a status like any other bad request. Knows no engine: it
speaks to EngineStreams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from orca_dist.answers import Piece, TextAssembler, pieces
from orca_dist.engine.streams import EngineStreams, RequestStream
from orca_dist.errors import OrcaError
from orca_dist.logs import about_request
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.server import convert
from orca_dist.server.callers import Callers
from orca_dist.server.details import abort_with
from orca_dist.server.prompts import PromptReader
from orca_dist.server.waiting import wait_at_most
from orca_dist.text import StopMatcher

SERVICE = "orca.v1.GenerateService"

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[bytes, Any]

log = logging.getLogger(__name__)


class GenerateServicer:
    """The service's calls. One loop only."""

    def __init__(
        self,
        *,
        streams: EngineStreams,
        callers: Callers,
        prompts: PromptReader,
        assembler: Callable[[], TextAssembler],
        info: Callable[[], pb.ServerInfoResponse],
        model: Callable[[], pb.ModelInfoResponse],
    ) -> None:
        self._streams = streams
        self._callers = callers
        self._prompts = prompts
        self._assembler = assembler
        self._info = info
        self._model = model
        self._open: set[RequestStream] = set()
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: OrcaError | None = None

    async def generate_stream(self, data: bytes, context: Context) -> None:
        """GenerateStream. A plain coroutine: a generator's `finally` waits for the collector."""
        async with self._call(context), self._answer(data, context) as (stream, parts):
            async for piece in parts:
                await context.write(convert.chunk(piece, stream))

    async def generate(self, data: bytes, context: Context) -> pb.GenerateResponse:
        """Generate."""
        async with self._call(context), self._answer(data, context) as (stream, parts):
            return convert.response([piece async for piece in parts], stream)

    async def server_info(self, data: bytes, context: Context) -> pb.ServerInfoResponse:
        """ServerInfo."""
        async with self._call(context):
            convert.parse(pb.ServerInfoRequest, data)
            return self._info()

    async def model_info(self, data: bytes, context: Context) -> pb.ModelInfoResponse:
        """ModelInfo."""
        async with self._call(context):
            convert.parse(pb.ModelInfoRequest, data)
            return self._model()

    async def tokenize(self, data: bytes, context: Context) -> pb.TokenizeResponse:
        """Tokenize."""
        async with self._call(context):
            request = convert.parse(pb.TokenizeRequest, data)
            return convert.tokenized(await self._prompts.encode(request))

    async def abort(self, data: bytes, context: Context) -> pb.AbortResponse:
        """Abort."""
        async with self._call(context):
            request_id = convert.request_id(convert.parse(pb.AbortRequest, data))
            self._streams.abort(request_id, self._callers.name(context))
            return pb.AbortResponse()

    @property
    def num_entries(self) -> int:
        """Calls and streams that are open."""
        return len(self._open) + self._num_calls

    async def wait_idle(self) -> None:
        """Returns when no call is open."""
        await self._idle.wait()

    def refuse(self, error: OrcaError) -> None:
        """From now on every call ends with `error`."""
        self._refusal = error

    async def drain(self, error: OrcaError, grace_s: float) -> None:
        """Refuse new calls; those still open after `grace_s` end with `error`."""
        self.refuse(error)
        await wait_at_most(self._idle.wait(), grace_s)
        for stream in list(self._open):
            stream.close()

    @contextlib.asynccontextmanager
    async def _call(self, context: Context) -> AsyncIterator[None]:
        """The root of a call: counts it, and turns what it raises into its status."""
        self._num_calls += 1
        self._idle.clear()
        try:
            self._check_open()
            yield
        except OrcaError as error:
            await abort_with(context, self._refusal or error)
        except (grpc.aio.AbortError, grpc.aio.InternalError):  # the latter: the caller is gone
            raise
        except Exception:
            log.exception("a call failed")
            await abort_with(context, OrcaError("internal error; the server's log has the details"))
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def _answer(
        self, data: bytes, context: Context
    ) -> AsyncIterator[tuple[RequestStream, AsyncIterator[Piece]]]:
        """The stream of the request in `data`, given back when the call ends, and its answer."""
        request = convert.parse(pb.GenerateRequest, data)
        request_id = convert.request_id(request)
        params = convert.sampling_params(request.sampling)
        prompt = await self._prompts.read(request)
        self._check_open()
        stream = self._streams.open(
            prompt=prompt,
            params=params,
            request_id=request_id,
            caller=self._callers.name(context),
            priority=request.priority,
            timeout_s=context.time_remaining(),
        )
        self._open.add(stream)
        try:
            stops = StopMatcher(params.stop, include_stop=params.include_stop)
            with about_request(stream.request_id):
                _log_start(stream, params)
                yield stream, pieces(stream, self._assembler(), stops)
                _log_end(stream)
        finally:
            stream.close()
            self._open.discard(stream)

    def _check_open(self) -> None:
        if self._refusal:
            raise self._refusal


def _log_start(stream: RequestStream, params: SamplingParams) -> None:
    log.debug("%d prompt tokens, max_tokens %s", stream.num_prompt_tokens, params.max_tokens)


def _log_end(stream: RequestStream) -> None:
    log.debug("%d tokens, %s", stream.num_tokens, stream.reason)


def handlers(servicer: GenerateServicer) -> grpc.GenericRpcHandler[bytes, Any]:
    """The service for grpc.aio.Server.add_generic_rpc_handlers."""
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "GenerateStream": grpc.unary_stream_rpc_method_handler(
                servicer.generate_stream, response_serializer=pb.GenerateChunk.SerializeToString
            ),
            "Generate": _unary(servicer.generate, pb.GenerateResponse),
            "ServerInfo": _unary(servicer.server_info, pb.ServerInfoResponse),
            "ModelInfo": _unary(servicer.model_info, pb.ModelInfoResponse),
            "Tokenize": _unary(servicer.tokenize, pb.TokenizeResponse),
            "Abort": _unary(servicer.abort, pb.AbortResponse),
        },
    )


def _unary(method: Callable[[bytes, Context], Any], response: type[Message]) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method, response_serializer=response.SerializeToString
    )
