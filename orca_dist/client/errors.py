"""A call's gRPC status, as the error of ours that it stands for.

Our servers send a google.rpc.Status with the error's stable code and its details;
without one the status decides, and an unreachable or foreign server becomes one
clear error that names the address.
"""

from __future__ import annotations

import re
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
HINTS = (  # gRPC's words for a connection that was not to be, and what may help
    (
        re.compile(r"failed to connect.*(Socket closed|Connection reset)"),
        "does it want TLS (--tls-ca, or --tls on), or a certificate of the client's "
        "(--tls-client-cert, --tls-client-key)?",
    ),
    (
        re.compile(r"Hostname Verification Check failed"),
        "its certificate is for another name than the address's: give that name by "
        "--tls-server-name",
    ),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED: (unable to|self.signed)"),
        "its certificate is of no CA that is trusted here: give the PEM file of its CA by --tls-ca",
    ),
    (
        re.compile(r"WRONG_VERSION_NUMBER"),
        "does it talk plain text? Then leave out --tls and --tls-*",
    ),
)
D = TypeVar("D", bound=Message)


def translate(
    error: grpc.RpcError | grpc.aio.AioRpcError, address: str, *, begun: bool = False
) -> OrcaError:
    """The OrcaError of a failed call to the server at `address`; `begun`: with a part answered."""
    ours = _ours(error)
    if begun and isinstance(ours, ServerClosing):
        return ServerClosing(f"the answer was cut off: {ours}")
    return ours or _foreign(error.code(), error.details() or "", address)


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
        return ServerUnavailable(f"no orca-dist server answers at {address}: {_hinted(message)}")
    if status in FOREIGN:
        return ServerUnavailable(f"{address} is not an orca-dist server: {status.name}: {message}")
    return BY_STATUS.get(status, OrcaError)(f"{address}: {status.name}: {message}")


def _hinted(message: str) -> str:
    hint = next((hint for pattern, hint in HINTS if pattern.search(message)), "")
    return f"{message.rstrip('.')}; {hint}" if hint else message
