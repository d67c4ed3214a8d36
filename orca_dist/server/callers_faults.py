"""What gRPC logs about its callers' faults, brought down to a line for those who look closely.

A health check whose bytes are no message, or a caller that leaves while its status is on
its way, would each put a traceback of gRPC's own into the log.
"""

from __future__ import annotations

import logging

import grpc
from google.protobuf.message import DecodeError

GRPC_LOG = "grpc._cython.cygrpc"
CALLERS_FAULTS = (DecodeError, grpc.aio.InternalError)  # the latter: the call is gone already

log = logging.getLogger(__name__)


def quiet_callers_faults() -> None:
    """Once is enough, more does no harm."""
    logging.getLogger(GRPC_LOG).addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether the record is to be logged as it is."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, CALLERS_FAULTS):
        return True
    log.debug("%s: %s", record.getMessage(), " ".join(str(error).split()))
    return False
