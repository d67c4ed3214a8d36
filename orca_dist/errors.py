"""Every error a person can meet, as one small tree.

An error carries a stable code, the gRPC status it travels as, the exit code a
command ends with, and a one-line message that says what, the value, the limit
and the fix. Knows nothing of gRPC itself: statuses are names.
"""

from __future__ import annotations


class OrcaError(Exception):
    """Base of the tree: `code` and `status` are part of the public contract."""

    code = "internal"
    status = "INTERNAL"
    exit_code = 1


class InvalidRequest(OrcaError):
    """A request field that can't be served; `field` names it as in the proto."""

    code = "invalid_request"
    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class DuplicateRequest(OrcaError):
    """The client-chosen id of a request is in use by a live one."""

    code = "duplicate_request"
    status = "ALREADY_EXISTS"


class QueueFull(OrcaError):
    """The bound on waiting requests is reached; try again later."""

    code = "queue_full"
    status = "RESOURCE_EXHAUSTED"


class MissingCapability(OrcaError):
    """The served model lacks what the call needs (a chat template, say)."""

    code = "missing_capability"
    status = "FAILED_PRECONDITION"


class RequestFailed(OrcaError):
    """One request went wrong inside a stage; its neighbours did not."""

    code = "request_failed"
    status = "INTERNAL"


class RequestCancelled(OrcaError):
    """The caller, or an operator, took the request back."""

    code = "request_cancelled"
    status = "CANCELLED"


class PipelineLost(OrcaError):
    """A stage died or hangs, and the pipeline with it."""

    code = "pipeline_lost"
    status = "UNAVAILABLE"
    exit_code = 4


class ConfigError(OrcaError):
    """A flag, key, file or combination of them that can't work."""

    code = "config"
    status = "INVALID_ARGUMENT"
    exit_code = 2


class ModelError(OrcaError):
    """A model folder or file that can't be used; the message names the file."""

    code = "model"
    status = "FAILED_PRECONDITION"
    exit_code = 3


class StartupError(OrcaError):
    """The server or one of its stages could not start."""

    code = "startup"
    status = "UNAVAILABLE"
    exit_code = 3
