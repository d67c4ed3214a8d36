"""Whether somebody answers at a Ray's address."""

from __future__ import annotations

import socket

from orca_dist.errors import StartupError

CONNECT_TIMEOUT_S = 10.0


def check_reachable(address: str) -> None:
    """Raises StartupError; Ray itself would go on trying for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise StartupError(
            f"no Ray answers at ray_address = {address}: {error}; `ray start --head` prints its own"
        ) from None
