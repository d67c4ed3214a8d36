"""A call's gRPC status, as the error of ours that it stands for.

Our servers send a google.rpc.Status with the error's stable code and its details;
without one the status decides, and an unreachable or foreign server becomes one
clear error that names the address.
"""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from orca_dist.errors import (
    ERROR_DOMAIN,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    MissingCapability,
    OrcaError,
    PipelineLost,
    QueueFull,
    RequestCancelled,
    RequestFailed,
    ServerClosing,
    ServerUnavailable,
    Unauthenticated,
    UnknownRequest,
)

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
        ServerClosing,
        Unauthenticated,
        UnknownRequest,
    )
}
BY_STATUS: dict[grpc.StatusCode, type[OrcaError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}
FOREIGN = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
D = TypeVar("D", bound=Message)


def translate(error: grpc.RpcError | grpc.aio.AioRpcError, address: str) -> OrcaError:
    """The OrcaError of a failed call to the server at `address`."""
    return _ours(error) or _foreign(error.code(), error.details() or "", address)


def _ours(error: grpc.RpcError | grpc.aio.AioRpcError) -> OrcaError | None:
    """An error that a server of ours raised; codes newer than this client go by status."""
    try:
        status = rpc_status.from_call(error)
        info = _detail(status, error_details_pb2.ErrorInfo)
        if info is None or info.domain != ERROR_DOMAIN:
            return None
        if info.reason == InvalidRequest.code:
            return _invalid(status)
        if info.reason == QueueFull.code:
            return _queue_full(status)
    except (ValueError, DecodeError):  # details that don't fit the status, or are damaged
        return None
    return (BY_CODE.get(info.reason) or BY_STATUS.get(error.code(), OrcaError))(status.message)


def _invalid(status: status_pb2.Status) -> InvalidRequest:
    bad = _detail(status, error_details_pb2.BadRequest)
    if bad is None or not bad.field_violations:
        return InvalidRequest("request", status.message)
    (violation, *_) = bad.field_violations
    return InvalidRequest(violation.field, violation.description)


def _queue_full(status: status_pb2.Status) -> QueueFull:
    retry = _detail(status, error_details_pb2.RetryInfo)
    if retry is None:
        return QueueFull(status.message)
    return QueueFull(status.message, retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9)


def _detail(status: status_pb2.Status | None, kind: type[D]) -> D | None:
    """The detail of one kind; None where there is none."""
    for packed in status.details if status else ():
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None


def _foreign(status: grpc.StatusCode, message: str, address: str) -> OrcaError:
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidRequest("request", message)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"no complete answer from {address} within the timeout")
    if status is grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailable(f"no orca-dist server answers at {address}: {message}")
    if status in FOREIGN:
        return ServerUnavailable(f"{address} is not an orca-dist server: {status.name}: {message}")
    return BY_STATUS.get(status, OrcaError)(f"{address}: {status.name}: {message}")
