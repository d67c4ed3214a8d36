"""Who calls, and whether they may: by key, else by client certificate, else all are one.

A server with keys answers without one to health checks alone.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health

from orca_dist.config import ServerConfig
from orca_dist.errors import Unauthenticated
from orca_dist.server.details import abort_with
from orca_dist.server.keys import ApiKeys, bearer
from orca_dist.server.watched import Watched

HEALTH = f"/{health.SERVICE_NAME}/"
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

Metadata = Iterable[tuple[str, str | bytes]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]

log = logging.getLogger(__name__)


class Callers:
    """`keys`: None where callers need none."""

    def __init__(self, keys: Watched[ApiKeys] | None) -> None:
        self._keys = keys

    @classmethod
    def of(cls, config: ServerConfig, variable: str) -> Callers:
        """As the file of `config` and the variable's value say; raises ConfigError."""
        path = config.api_keys_file
        if path is None and not variable.split():
            return cls(None)
        return cls(Watched([path] if path else [], lambda: ApiKeys.read(path, variable)))

    @property
    def need_keys(self) -> bool:
        return self._keys is not None

    def has_key(self, metadata: Metadata) -> bool:
        """Whether a call may come in."""
        return self._keys is None or self._name(metadata) is not None

    def name(self, context: Context) -> str:
        """Whose call it is; "" where callers can't be told apart."""
        if self._keys is None:
            return b",".join(context.peer_identities() or ()).decode(errors="replace")
        name = self._name(context.invocation_metadata() or ())
        if name is None:  # taken away since the call came in
            raise _refusal()
        return name

    def _name(self, metadata: Metadata) -> str | None:
        assert self._keys is not None, "only where callers need keys"
        return self._keys.get().name_of(bearer(metadata))


class KeyGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns calls without a key away before their messages are read."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method.startswith(HEALTH) or self._callers.has_key(
            handler_call_details.invocation_metadata or ()
        ):
            return await continuation(handler_call_details)
        log.debug("%s: refused a call without a valid key", method)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: AsyncIterator[bytes], context: Context) -> None:
    await abort_with(context, _refusal())


def _refusal() -> Unauthenticated:
    """The same for every reason: who guesses learns nothing."""
    return Unauthenticated("this server needs a valid API key")
