"""A call's gRPC status, as the error of ours that it stands for.

Our servers send the error's stable code in a trailer; without one the status
decides, and an unreachable or foreign server becomes one clear error that names
the address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from orca_dist.errors import (
    DuplicateRequest,
    InvalidRequest,
    MissingCapability,
    OrcaError,
    PipelineLost,
    QueueFull,
    RequestCancelled,
    RequestFailed,
)

CODE_TRAILER = "orca-error"
FIELD_TRAILER = "orca-field"


class ServerUnavailable(OrcaError):
    """No server of ours answers at the address, or it is shutting down."""

    code = "server_unavailable"
    status = "UNAVAILABLE"


class DeadlineExceeded(OrcaError):
    """The call's timeout passed before its answer was complete."""

    code = "deadline_exceeded"
    status = "DEADLINE_EXCEEDED"


BY_CODE = {
    kind.code: kind
    for kind in (
        DuplicateRequest,
        MissingCapability,
        OrcaError,
        PipelineLost,
        QueueFull,
        RequestCancelled,
        RequestFailed,
    )
}
BY_STATUS: dict[grpc.StatusCode, type[OrcaError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
}
FOREIGN = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


def translate(error: grpc.RpcError | grpc.aio.AioRpcError, address: str) -> OrcaError:
    """The OrcaError of a failed call to the server at `address`."""
    status, message = error.code(), error.details() or ""
    metadata: Any = error.trailing_metadata() or ()  # pairs, in both of grpc's kinds
    trailers = {key: str(value) for key, value in metadata}
    if CODE_TRAILER in trailers:
        return _ours(status, message, trailers)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidRequest("request", message)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no complete answer from {address} within the timeout")
    if status is grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailable(f"no orca-dist server answers at {address}: {message}")
    if status in FOREIGN:
        return ServerUnavailable(f"{address} is not an orca-dist server: {status.name}: {message}")
    return BY_STATUS.get(status, OrcaError)(f"{address}: {status.name}: {message}")


def _ours(status: grpc.StatusCode, message: str, trailers: Mapping[str, str]) -> OrcaError:
    """An error that a server of ours raised; codes newer than this client go by status."""
    code = trailers[CODE_TRAILER]
    if code == InvalidRequest.code:
        field = trailers.get(FIELD_TRAILER, "request")
        return InvalidRequest(field, message.removeprefix(f"{field}: "))
    return (BY_CODE.get(code) or BY_STATUS.get(status, OrcaError))(message)
