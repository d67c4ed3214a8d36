"""Every error a person can meet, as one small tree.

An error carries a stable code, the gRPC status it travels as, the exit code a
command ends with, and a one-line message that says what, the value, the limit
and the fix. docs/errors.md is made from here: the docstring says what happened,
`fix` what to do. Knows nothing of gRPC itself: statuses are names.
"""

from __future__ import annotations

ERROR_DOMAIN = "orca-dist"  # of the google.rpc.ErrorInfo that carries a code


class OrcaError(Exception):
    """Something went wrong that nobody foresaw; the base of all others."""

    retry_after_s: float | None = None  # how long to wait before the same call can go well
    code = "internal"
    status = "INTERNAL"
    exit_code = 1
    fix = "Look into the server's log; report it."


class InvalidRequest(OrcaError):
    """A request field that can't be served; `field` names it as in the proto."""

    code = "invalid_request"
    status = "INVALID_ARGUMENT"
    fix = "Change the field that the message names."

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unauthenticated(OrcaError):
    """The call came without a key that the server knows."""

    code = "unauthenticated"
    status = "UNAUTHENTICATED"
    fix = "Give a key of the server's: ORCA_API_KEY, --api-key-file, or Client(api_key=...)."


class DuplicateRequest(OrcaError):
    """The client-chosen id of a request is in use by a live one of the same caller."""

    code = "duplicate_request"
    status = "ALREADY_EXISTS"
    fix = "Choose another request_id, or leave it out."


class UnknownRequest(OrcaError):
    """No live request of this caller has this id: it never was, or it has ended."""

    code = "unknown_request"
    status = "NOT_FOUND"
    fix = "Give the request_id of a request that is still running or waiting."


class QueueFull(OrcaError):
    """A bound on what may wait is reached; `retry_after_s` says when to try again."""

    code = "queue_full"
    status = "RESOURCE_EXHAUSTED"
    fix = "Try again later, or raise max_queue or max_queue_tokens."

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MissingCapability(OrcaError):
    """The served model lacks what the call needs (a chat template, say)."""

    code = "missing_capability"
    status = "FAILED_PRECONDITION"
    fix = "Do without it (plain text in place of a chat), or serve another model."


class RequestFailed(OrcaError):
    """One request went wrong inside a stage; its neighbours did not."""

    code = "request_failed"
    status = "INTERNAL"
    fix = "Look at the message and the server's log; another prompt may work."


class RequestCancelled(OrcaError):
    """The caller, or an operator, took the request back."""

    code = "request_cancelled"
    status = "CANCELLED"
    fix = "Send it again if it is still wanted."


class DeadlineExceeded(OrcaError):
    """The call's timeout passed before its answer was complete."""

    code = "deadline_exceeded"
    status = "DEADLINE_EXCEEDED"
    fix = "Give a longer timeout, or ask for fewer tokens."


class PipelineLost(OrcaError):
    """A stage died or hangs, and the pipeline with it."""

    code = "pipeline_lost"
    status = "UNAVAILABLE"
    exit_code = 4
    fix = "Read which stage was lost and why; start the server again."


class ServerUnavailable(OrcaError):
    """No server of ours answers at the address, or it is shutting down."""

    code = "server_unavailable"
    status = "UNAVAILABLE"
    fix = "Check the address, and that the server has printed `ready`."


class ServerClosing(ServerUnavailable):
    """The server is shutting down."""

    retry_after_s = 1.0  # for another server, or this one's successor
    code = "server_closing"
    fix = "Send the request to another server, or again once this one is back."


class ConfigError(OrcaError):
    """A flag, key, file or combination of them that can't work."""

    code = "config"
    status = "INVALID_ARGUMENT"
    exit_code = 2
    fix = "Change what the message names; docs/cli.md lists every setting."


class ModelError(OrcaError):
    """A model folder or file that can't be used; the message names the file."""

    code = "model"
    status = "FAILED_PRECONDITION"
    exit_code = 3
    fix = "Repair or fetch the file again, or give another folder."


class StartupError(OrcaError):
    """The server or one of its stages could not start."""

    code = "startup"
    status = "UNAVAILABLE"
    exit_code = 3
    fix = "Read what was missing: a port, memory, a place for a stage, time."
