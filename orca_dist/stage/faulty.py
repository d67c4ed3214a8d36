"""A stage that comes to harm when a signal says so: what `orca-dist bench chaos` runs.

Until then it is as any other. SIGUSR1: the next layer that it computes raises; SIGRTMIN: it never
ends. SIGUSR2: the connections of its data links are cut; SIGHUP: those of its control stream are.
The process lives on each time; how it goes on is the business of the code that every stage has.
As a script it is a stage process of the local launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orca_dist.proto.v1.control_pb2 import Open
from orca_dist.stage.process import main
from orca_dist.stage.worker import StageWorker
from orca_dist.transport.channel import Channel

RAISE, HANG = signal.SIGUSR1, signal.SIGRTMIN
CUT_LINKS, HANG_UP = signal.SIGUSR2, signal.SIGHUP
OPEN_FILES = Path("/proc/self/fd")

Inode = str  # a socket's name in the kernel, which no other ever has


class InjectedFault(Exception):
    """As the signal wanted it."""


@dataclass(slots=True)
class Orders:
    """What the signals asked for, and what they need to know; one for workers of all epochs."""

    to_raise: threading.Event = field(default_factory=threading.Event)
    to_hang: threading.Event = field(default_factory=threading.Event)
    links: frozenset[Inode] = frozenset()  # of the newest epoch
    store_port: int = 0


class FaultyWorker(StageWorker):
    """Notes which connections are its data links; raises or hangs once it is told to."""

    def __init__(self, *, host: str) -> None:
        super().__init__(host=host)
        self.orders = Orders()

    def _open_links(self, epoch: Open) -> tuple[Channel | None, Channel | None]:
        self.orders.store_port = int(epoch.store_address.rpartition(":")[2])
        before = frozenset(_connections(self.orders.store_port))
        links = super()._open_links(epoch)
        self.orders.links = frozenset(_connections(self.orders.store_port)) - before
        return links

    def _enter_layer(self) -> float:
        entered_s = super()._enter_layer()
        if self.orders.to_raise.is_set():
            self.orders.to_raise.clear()
            raise InjectedFault(f"stage {self._setup.stage} was told to raise")
        if self.orders.to_hang.is_set():
            threading.Event().wait()
        return entered_s


def obedient_worker(*, host: str) -> FaultyWorker:
    """A worker whose process obeys the four signals from now on. Main thread only."""
    worker = FaultyWorker(host=host)
    orders = worker.orders
    signal.signal(RAISE, lambda signum, frame: orders.to_raise.set())
    signal.signal(HANG, lambda signum, frame: orders.to_hang.set())
    signal.signal(CUT_LINKS, lambda signum, frame: _cut(orders, are_links=True))
    signal.signal(HANG_UP, lambda signum, frame: _cut(orders, are_links=False))
    return worker


def _cut(orders: Orders, *, are_links: bool) -> None:
    """Shut down the data links; or all connections that are neither links nor the store's."""
    for inode, connection in _connections(orders.store_port).items():
        if (inode in orders.links) is are_links:
            with contextlib.suppress(OSError):  # its other end was faster
                connection.shutdown(socket.SHUT_RDWR)


def _connections(without_port: int) -> dict[Inode, socket.socket]:
    """This process's TCP connections, but those with `without_port` at either end."""
    found = {}
    for inode, connection in _sockets():
        with contextlib.suppress(OSError):  # it listens, or has been cut
            ports = {connection.getsockname()[1], connection.getpeername()[1]}
            if without_port not in ports:
                found[inode] = connection
    return found


def _sockets() -> Iterator[tuple[Inode, socket.socket]]:
    """Of IP only; each as a duplicate, which is the caller's."""
    for path in OPEN_FILES.iterdir():
        with contextlib.suppress(OSError):  # it has been closed meanwhile, or is the folder's own
            if not (inode := os.readlink(path)).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(path.name)))
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield inode, duplicate


if __name__ == "__main__":
    main(obedient_worker)
