"""A client as the flags and the environment say: where to, with which key, over TLS or not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from orca_dist.cli.settings import API_KEY_VARIABLE, AccessConfig, ClientConfig
from orca_dist.config import Switch

if TYPE_CHECKING:
    from orca_dist.client import Client, Tls


def connect(client: ClientConfig, access: AccessConfig) -> Client:
    """Not connected yet; raises ConfigError for what can't work with any server."""
    from orca_dist.client import Client

    return Client(
        client.address,
        api_key=_api_key(access),
        tls=_tls(access),
        insecure_key=access.insecure_key is Switch.ON,
    )


def _api_key(access: AccessConfig) -> str:
    from orca_dist.credentials import read_api_key

    if access.api_key_file is not None:
        return read_api_key("api_key_file", access.api_key_file)
    return os.environ.get(API_KEY_VARIABLE, "")


def _tls(access: AccessConfig) -> Tls | None:
    from orca_dist.client import Tls

    if not access.uses_tls:
        return None
    return Tls(
        ca=access.tls_ca,
        cert=access.tls_client_cert,
        key=access.tls_client_key,
        server_name=access.tls_server_name,
    )
