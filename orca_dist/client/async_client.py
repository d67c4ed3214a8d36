"""The asyncio client of orca.v1.GenerateService. Needs neither torch nor ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orca_dist.client import results
from orca_dist.client.channel import DEFAULT_ADDRESS, OPTIONS, Tls, key_metadata
from orca_dist.client.errors import translate
from orca_dist.client.requests import (
    GREEDY,
    Message,
    Prompt,
    abort_request,
    generate_request,
    tokenize_request,
)
from orca_dist.client.results import Chunk, Completion, ModelInfo, ServerInfo
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.proto.v1 import generate_pb2_grpc

T = TypeVar("T")


class AsyncClient:
    """As Client, on the running loop. Cancelling a task cancels its request."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str = "",
        tls: Tls | None = None,
        insecure_key: bool = False,
    ) -> None:
        """`tls`: None talks plain text. Raises ConfigError for files that don't do, and for a key
        that would leave this machine without TLS, unless `insecure_key` allows it.
        """
        self.address = address
        self._metadata = key_metadata(api_key, address, tls, insecure_key=insecure_key)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(
                address, tls.credentials(), options=tls.options()
            )
        self._stub = generate_pb2_grpc.GenerateServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer to text, token ids or chat messages."""
        request = generate_request(prompt, params, request_id, priority)
        return results.completion(await self._call(self._stub.Generate, request, timeout_s))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """The answer as it is generated; `aclose()` or a cancelled task cancels the request."""
        request = generate_request(prompt, params, request_id, priority)
        return self._chunks(request, timeout_s)

    async def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The pipeline's stages and limits."""
        return results.server_info(
            await self._call(self._stub.ServerInfo, pb.ServerInfoRequest(), timeout_s)
        )

    async def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What the model takes and how its answers end."""
        return results.model_info(
            await self._call(self._stub.ModelInfo, pb.ModelInfoRequest(), timeout_s)
        )

    async def tokenize(
        self, prompt: str | Sequence[Message], *, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """The token ids of a text or of chat messages, as a prompt would have them."""
        request = tokenize_request(prompt)
        return tuple((await self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """End a live request of this caller; raises UnknownRequest without one."""
        await self._call(self._stub.Abort, abort_request(request_id), timeout_s)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the server is serving; raises where none answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await self._call(self._health.Check, request, timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Hang up: what is running is cancelled."""
        await self._channel.close(grace=None)

    async def _call(
        self, method: Callable[..., Awaitable[T]], request: ProtoMessage, timeout_s: float | None
    ) -> T:
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self.address) from None

    async def _chunks(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncIterator[Chunk]:
        call = self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        begun = False
        try:
            async for message in call:
                begun = True
                yield results.chunk(message)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self.address, begun=begun) from None
        finally:
            call.cancel()
