"""A blocking client of orca.v1.GenerateService. Needs neither torch nor ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

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


class Call(Protocol):
    """A streaming call in progress."""

    def __iter__(self) -> Iterator[pb.GenerateChunk]: ...
    def cancel(self) -> object: ...


class Client:
    """Connects on the first call. Every method raises an OrcaError where a call fails."""

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
            self._channel = grpc.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=tls.options())
        self._stub = generate_pb2_grpc.GenerateServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
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
        return results.completion(self._call(self._stub.Generate, request, timeout_s))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """The answer as it is generated; leaving the loop early cancels the request."""
        request = generate_request(prompt, params, request_id, priority)
        return self._chunks(
            self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
        )

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The pipeline's stages and limits."""
        return results.server_info(
            self._call(self._stub.ServerInfo, pb.ServerInfoRequest(), timeout_s)
        )

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What the model takes and how its answers end."""
        return results.model_info(
            self._call(self._stub.ModelInfo, pb.ModelInfoRequest(), timeout_s)
        )

    def tokenize(
        self, prompt: str | Sequence[Message], *, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """The token ids of a text or of chat messages, as a prompt would have them."""
        request = tokenize_request(prompt)
        return tuple(self._call(self._stub.Tokenize, request, timeout_s).token_ids)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """End a live request of this caller; raises UnknownRequest without one."""
        self._call(self._stub.Abort, abort_request(request_id), timeout_s)

    def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the server is serving; raises where none answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = self._call(self._health.Check, request, timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Hang up: what is running is cancelled."""
        self._channel.close()

    def _call(self, method: Callable[..., T], request: ProtoMessage, timeout_s: float | None) -> T:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None

    def _chunks(self, call: Call) -> Iterator[Chunk]:
        begun = False
        try:
            for message in call:
                begun = True
                yield results.chunk(message)
        except grpc.RpcError as error:
            raise translate(error, self.address, begun=begun) from None
        finally:
            call.cancel()
