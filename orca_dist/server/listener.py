"""The server's port: taken before the weights load, so that a port in use costs nothing."""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass

import grpc

from orca_dist.config import ServerConfig
from orca_dist.errors import ConfigError, StartupError
from orca_dist.server.callers_faults import quiet_callers_faults

MAX_REQUEST_BYTES = 16 * 2**20
MAX_PORT = 65535

OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers share a port in silence
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.keepalive_time_ms", 60_000),  # finds clients that left without a goodbye
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # lets clients do the same
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A bound server that answers nobody yet; `address` is HOST:PORT."""

    server: grpc.aio.Server
    address: str


async def listen(config: ServerConfig) -> Listener:
    """Take the port of `config`; raises StartupError where that can't be done."""
    if not 0 <= config.port <= MAX_PORT:
        raise ConfigError(f"port = {config.port}: must be in 0..{MAX_PORT}")
    wanted = join_address(config.host, config.port)
    _try_port(config.host, config.port)
    quiet_callers_faults()
    server = grpc.aio.server(options=OPTIONS)
    try:
        port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise StartupError(f"can't listen on {wanted}: {error}") from None
    return Listener(server=server, address=join_address(config.host, port))


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _try_port(host: str, port: int) -> None:
    """Take the port for a moment: the system says why it can't be had, grpc doesn't."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in places:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        raise StartupError(
            f"can't listen on {join_address(host, port)}: {error.strerror}; "
            "choose another --port (0 picks a free one) or --host"
        ) from None
    _warn_where_open(host, {str(place[0]) for *_, place in places})


def _warn_where_open(host: str, addresses: set[str]) -> None:
    if not all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses):
        log.warning(
            "listening on %s: anyone who reaches it can use the server, there is no authentication",
            host,
        )
