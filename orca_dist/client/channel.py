"""How clients connect: limits, keepalive, TLS and the key; the same for both kinds."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc

from orca_dist.credentials import KEY_RULE, is_key, read_authorities, read_pair
from orca_dist.errors import ConfigError

MAX_MESSAGE_BYTES = 64 * 2**20
DEFAULT_ADDRESS = "127.0.0.1:50051"

OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each client, never a shared one
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # finds a server whose machine is gone
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the longest wait for a silent port
    ("grpc.enable_http_proxy", 0),  # a serving cluster is not behind the way out
)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Whom to trust, and what to show, in PEM files.

    ca: the CAs of the server's certificate; None: the well-known ones that gRPC brings.
    cert, key: the client's own, for servers that ask for one (mutual TLS).
    server_name: the name in the server's certificate, where it isn't the address's.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError for files that don't do."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls_client_cert and tls_client_key belong together: give both")
        ca = read_authorities("tls_ca", Path(self.ca)) if self.ca else None
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        chain, key = read_pair("tls_client_cert", Path(self.cert), "tls_client_key", Path(self.key))
        return grpc.ssl_channel_credentials(ca, key, chain)

    def options(self) -> tuple[tuple[str, int | str], ...]:
        name = ("grpc.ssl_target_name_override", self.server_name)
        return (*OPTIONS, name) if self.server_name else OPTIONS


def key_metadata(api_key: str, address: str, tls: Tls | None, *, insecure_key: bool) -> Metadata:
    """What carries the key in each call; raises ConfigError where it would be for all to read."""
    if not api_key:
        return ()
    if not is_key(api_key):
        raise ConfigError(f"api_key: is none: needs {KEY_RULE}")
    if tls is None and not insecure_key and not _is_loopback(address):
        raise ConfigError(
            f"address = {address}: the API key would cross the network in the clear; use TLS "
            "(--tls on, or --tls-ca), or, where the network itself is trusted, --insecure-key on"
        )
    return (("authorization", f"Bearer {api_key}"),)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")
