"""Whether a Ray head answers somebody who has no token: such a one lets anybody run code.

Asked over the wire, since neither a variable here nor one of its processes says what it
does. The call is the head's own check of who is alive; it changes nothing.
"""

from __future__ import annotations

import grpc

from orca_dist.doctor.facts import RayPort

METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
TIMEOUT_S = 5.0
NO_PROXY = (("grpc.enable_http_proxy", 0),)


def ask_without_token(address: str) -> RayPort:
    """One call to the head at `address`, host:port."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        try:
            channel.unary_unary(METHOD)(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return _refused(address, error)
    return RayPort(address=address, open=True)


def _refused(address: str, error: grpc.RpcError) -> RayPort:
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return RayPort(address=address, open=False)
    problem = f"{error.code().name}: {' '.join(error.details().split())}"
    return RayPort(address=address, open=None, problem=problem)
