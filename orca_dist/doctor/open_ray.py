"""Whether a Ray head answers somebody who has no token: such a one lets anybody run code.

Asked over the wire, since neither a variable here nor one of its processes says what it
does.
"""

from __future__ import annotations

import grpc

from orca_dist.doctor.facts import RayPort
from orca_dist.engine.ray_address import ask_head


def ask_without_token(address: str) -> RayPort:
    """One call to the head at `address`, host:port."""
    error = ask_head(address)
    if error is None:
        return RayPort(address=address, open=True)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return RayPort(address=address, open=False)
    problem = f"{error.code().name}: {' '.join(error.details().split())}"
    return RayPort(address=address, open=None, problem=problem)
