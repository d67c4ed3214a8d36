"""A blocking client of orca.v1.GenerateService. Needs neither torch nor ray."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orca_dist.client import results
from orca_dist.client.channel import DEFAULT_ADDRESS, OPTIONS
from orca_dist.client.errors import translate
from orca_dist.client.requests import GREEDY, Prompt, generate_request
from orca_dist.client.results import Chunk, Completion, ServerInfo
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.proto.v1 import generate_pb2_grpc


class Call(Protocol):
    """A streaming call in progress."""

    def __iter__(self) -> Iterator[pb.GenerateChunk]: ...
    def cancel(self) -> object: ...


class Client:
    """Connects on the first call. Every method raises an OrcaError where a call fails."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
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
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer to text, token ids or chat messages."""
        request = generate_request(prompt, params, request_id)
        try:
            return results.completion(self._stub.Generate(request, timeout=timeout_s))
        except grpc.RpcError as error:
            raise translate(error, self.address) from None

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Iterator[Chunk]:
        """The answer as it is generated; leaving the loop early cancels the request."""
        request = generate_request(prompt, params, request_id)
        return self._chunks(self._stub.GenerateStream(request, timeout=timeout_s))

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The pipeline's stages and limits."""
        try:
            return results.server_info(
                self._stub.ServerInfo(pb.ServerInfoRequest(), timeout=timeout_s)
            )
        except grpc.RpcError as error:
            raise translate(error, self.address) from None

    def health(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the server is serving; raises where none answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = self._health.Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Hang up: what is running is cancelled."""
        self._channel.close()

    def _chunks(self, call: Call) -> Iterator[Chunk]:
        try:
            for message in call:
                yield results.chunk(message)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        finally:
            call.cancel()
