"""Whether the Ray at an address will have this process: somebody answers, and knows its token."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence

import grpc

from orca_dist.errors import StartupError

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 5.0
TOKENS = "ray._private.authentication.authentication_token_setup"
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # who is there; it changes nothing
NO_PROXY = (("grpc.enable_http_proxy", 0),)

Headers = Sequence[tuple[str, str]]


def check_joinable(address: str) -> None:
    """Before ray.init(address), which would go on trying for long; shows it the token, too.

    Raises StartupError. Names such as auto are Ray's to find.
    """
    host, _, port = address.rpartition(":")
    has_port = "://" not in address and port.isdecimal()
    if has_port:
        _check_reachable(address, host, int(port))
    show_token()
    if has_port:
        _check_admitted(address)


def show_token() -> None:
    """As `ray start` does, and ray.init does not: where there is a token, it is shown.

    A Ray that asks for none does not mind; RAY_AUTH_MODE=disabled keeps it.
    """
    if "RAY_AUTH_MODE" not in os.environ and _has_token():
        importlib.import_module(TOKENS)._enable_token_auth()


def ask_head(address: str, headers: Headers = ()) -> grpc.RpcError | None:
    """What the head at host:port has against somebody who shows these headers; None: nothing."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=ANSWER_TIMEOUT_S, metadata=headers)
        except grpc.RpcError as error:
            return error
    return None


def _check_reachable(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise StartupError(
            f"no Ray answers at ray_address = {address}: {error}; `ray start --head` prints its own"
        ) from None


def _check_admitted(address: str) -> None:
    """A refused token; whatever else is wrong is for Ray to say."""
    headers = _token_headers()
    problem = ask_head(address, headers)
    if problem is not None and problem.code() is grpc.StatusCode.UNAUTHENTICATED:
        refused = "the token of this process" if headers else "who has no token"
        raise StartupError(
            f"the Ray at ray_address = {address} refuses {refused}: give it the one that the nodes "
            "were started with, in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )


def _token_headers() -> Headers:
    if not _has_token():
        return ()
    loader = importlib.import_module(TOKENS).AuthenticationTokenLoader.instance()
    return tuple(loader.get_token_for_http_header().items())


def _has_token() -> bool:
    """By a variable or a file; never where Ray knows no tokens yet."""
    try:
        tokens = importlib.import_module(TOKENS)
    except ImportError:
        return False
    return bool(tokens.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
