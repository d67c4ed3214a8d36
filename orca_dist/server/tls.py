"""The server's certificates: TLS, and mutual TLS where clients have to show theirs.

Every handshake looks whether the files have changed; a connection that is open
keeps what it was made with.
"""

from __future__ import annotations

from pathlib import Path

import grpc

from orca_dist.config import ServerConfig
from orca_dist.credentials import read_authorities, read_pair
from orca_dist.server.watched import Watched


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """None where `config` names no certificate; raises ConfigError for files that don't do."""
    cert, key, client_ca = config.tls_cert, config.tls_key, config.tls_client_ca
    if cert is None or key is None:
        return None
    paths = [cert, key, *([client_ca] if client_ca else [])]
    renewal = _Renewal(Watched(paths, lambda: _configuration(cert, key, client_ca)))
    return grpc.dynamic_ssl_server_credentials(
        renewal.current, renewal.changed, require_client_authentication=client_ca is not None
    )


class _Renewal:
    """What gRPC asks at each handshake, on a thread of its own."""

    def __init__(self, watched: Watched[grpc.ServerCertificateConfiguration]) -> None:
        self._watched = watched
        self.current = watched.get()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates in force, where they are others than last time."""
        before, self.current = self.current, self._watched.get()
        return None if self.current is before else self.current


def _configuration(
    cert: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCertificateConfiguration:
    chain, private_key = read_pair("tls_cert", cert, "tls_key", key)
    authorities = read_authorities("tls_client_ca", client_ca) if client_ca else None
    return grpc.ssl_server_certificate_configuration([(private_key, chain)], authorities)
