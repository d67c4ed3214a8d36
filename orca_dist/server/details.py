"""An error of ours as a google.rpc.Status: its code, and what a client can act on.

ErrorInfo carries the stable code, BadRequest the field at fault, RetryInfo when to
try again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from orca_dist.errors import ERROR_DOMAIN, InvalidRequest, OrcaError

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

MAX_MESSAGE_BYTES = 1000  # statuses travel in headers, which have a limit of their own


def rich_status(error: OrcaError) -> status_pb2.Status:
    """What grpc_status.rpc_status.to_status takes."""
    number, _ = grpc.StatusCode[error.status].value
    status = status_pb2.Status(code=number, message=_short(str(error)))
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


async def abort_with(context: Context, error: OrcaError) -> None:
    """End the call with the error's status; raises, as grpc's abort does."""
    status = rpc_status.to_status(rich_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _details(error: OrcaError) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(reason=error.code, domain=ERROR_DOMAIN)
    if isinstance(error, InvalidRequest):
        bad = error_details_pb2.BadRequest()
        description = _short(str(error).removeprefix(f"{error.field}: "))
        bad.field_violations.add(field=error.field, description=description)
        yield bad
    if error.retry_after_s is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        yield info


def _short(text: str) -> str:
    data = text.encode(errors="replace")
    return data[:MAX_MESSAGE_BYTES].decode(errors="ignore")
