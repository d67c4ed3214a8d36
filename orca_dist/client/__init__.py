"""Clients of the generate service, blocking and asyncio. Needs neither torch nor ray."""

from orca_dist.client.async_client import AsyncClient
from orca_dist.client.channel import DEFAULT_ADDRESS, Tls
from orca_dist.client.results import (
    Chunk,
    Completion,
    ModelInfo,
    ServerInfo,
    StageInfo,
    Usage,
    joined,
)
from orca_dist.client.sync_client import Client
from orca_dist.errors import DeadlineExceeded, ServerUnavailable, Unauthenticated

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "ModelInfo",
    "ServerInfo",
    "ServerUnavailable",
    "StageInfo",
    "Tls",
    "Unauthenticated",
    "Usage",
    "joined",
]
