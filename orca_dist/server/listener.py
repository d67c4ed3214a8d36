"""The server's port, and who may come in there.

Taken before the weights load, so that a port in use, or a wrong certificate, costs nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from orca_dist.config import ServerConfig, Switch
from orca_dist.errors import ConfigError, StartupError
from orca_dist.server.callers import Callers, KeyGate
from orca_dist.server.callers_faults import quiet_callers_faults
from orca_dist.server.tls import server_credentials

OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers share a port in silence
    ("grpc.keepalive_time_ms", 60_000),  # finds clients that left without a goodbye
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # lets clients do the same
)

Place = tuple[socket.AddressFamily, tuple[Any, ...]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A bound server that answers nobody yet; `address` is HOST:PORT."""

    server: grpc.aio.Server
    address: str
    callers: Callers


async def listen(config: ServerConfig, api_keys: str = "") -> Listener:
    """Take the port of `config`; `api_keys` are keys beside those of its file, name:key each.

    Raises ConfigError for settings or files that can't work, StartupError where the port
    can't be had.
    """
    config.check()
    callers = Callers.of(config, api_keys)
    credentials = server_credentials(config)
    problem = _open_to_strangers(config, callers, _try_port(config.host, config.port))
    if problem:
        log.warning("listening on %s: %s", config.host, problem)
    quiet_callers_faults()
    server = grpc.aio.server(
        options=_options(config), interceptors=[KeyGate(callers)] if callers.need_keys else []
    )
    port = _bind(server, join_address(config.host, config.port), credentials)
    return Listener(server=server, address=join_address(config.host, port), callers=callers)


def check_access(config: ServerConfig, api_keys: str = "") -> str:
    """Raises ConfigError where listen() would, the port left alone.

    Returns what strangers could do where allow_insecure lets them; empty: they can't come in.
    """
    config.check()
    callers = Callers.of(config, api_keys)
    server_credentials(config)
    try:
        return _open_to_strangers(config, callers, _places(config.host, config.port))
    except OSError:  # a host that is none
        return ""


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    return (
        *OPTIONS,
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_concurrent_streams", config.max_streams),
    )


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise StartupError(f"can't listen on {address}: {error}") from None


def _places(host: str, port: int) -> list[Place]:
    """What `host` stands for; raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, place) for family, _, _, _, place in found]


def _try_port(host: str, port: int) -> list[Place]:
    """Take the port for a moment: the system says why it can't be had, grpc doesn't."""
    try:
        places = _places(host, port)
        for family, place in places:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        raise StartupError(
            f"can't listen on {join_address(host, port)}: {error.strerror}; "
            "choose another --port (0 picks a free one) or --host"
        ) from None
    return places


def _open_to_strangers(config: ServerConfig, callers: Callers, places: Sequence[Place]) -> str:
    """What other machines reach is to be closed to strangers, or opened to them on purpose.

    Raises ConfigError where it is neither; returns what they could do.
    """
    danger = _danger(config, callers)
    if danger is None or all(is_loopback(str(place[0])) for _, place in places):
        return ""
    problem, remedy = danger
    if config.allow_insecure is Switch.OFF:
        raise ConfigError(
            f"host = {config.host}: {problem}; {remedy}, listen on 127.0.0.1, or, where the "
            "network itself keeps others out, say --allow-insecure on"
        )
    return problem


def _danger(config: ServerConfig, callers: Callers) -> tuple[str, str] | None:
    """What is wrong with a port that others reach, and what would mend it."""
    if not callers.need_keys and config.tls_client_ca is None:
        return (
            "anyone who reaches it could use the server, there is no authentication",
            "give --api-keys-file with --tls-cert and --tls-key, or --tls-client-ca",
        )
    if config.tls_cert is None:
        return "keys would cross the network in the clear", "give --tls-cert and --tls-key"
    return None


def is_loopback(address: str) -> bool:
    """Whether an IP address is this machine's own."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
