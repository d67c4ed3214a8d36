"""The public gRPC service, its health, and the port it listens on."""

from orca_dist.server.app import Server
from orca_dist.server.listener import Listener, listen

__all__ = ["Listener", "Server", "listen"]
