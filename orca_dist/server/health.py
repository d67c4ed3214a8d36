"""The standard grpc.health.v1 service, with one truth for all of its names."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from orca_dist.server.servicer import SERVICE

NAMES = ("", SERVICE)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """NOT_SERVING until it is told otherwise."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def join(self, server: grpc.aio.Server) -> None:
        """Become one of `server`'s services, before it starts."""
        await self.set(serving=False)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, *, serving: bool) -> None:
        for name in NAMES:
            await self._servicer.set(name, SERVING if serving else NOT_SERVING)
