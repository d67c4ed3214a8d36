"""A TCP connection between two nodes: whether there is one, how fast, and what time it is there.

The listener takes the node's own address only, on a free port, and answers nobody who
doesn't know the run's token. Two requests: PING is answered by the listener's clock, DATA
is a chunk that is read and forgotten.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from dataclasses import dataclass
from statistics import median

from orca_dist.doctor.facts import Link

PING, DATA = b"p", b"d"
CLOCK = struct.Struct("!d")  # seconds since 1970, as the listener's clock has them
CHUNK_BYTES = 2**18
NUM_PINGS = 21
SEND_S = 0.25  # for how long chunks are sent
CONNECT_TIMEOUT_S = 3.0
TIMEOUT_S = 10.0
LIFETIME_S = 60.0  # of one connection, whoever is at its other end


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a node listens."""

    node: str
    host: str
    port: int


class ProbeListener:
    """Listens from its making until close(), on threads of its own."""

    def __init__(self, host: str, token: bytes) -> None:
        """Raises OSError where `host` is no address of this machine."""
        self._token = token
        self._socket = socket.create_server((host, 0), family=_family(host), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="probe", daemon=True).start()

    def close(self) -> None:
        """Connections that are open end by themselves. Any number of times."""
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept(), which keeps the port else
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + LIFETIME_S
        connection.settimeout(TIMEOUT_S)
        with connection:
            try:
                if hmac.compare_digest(_read(connection, len(self._token)), self._token):
                    _no_delay(connection)
                    while time.monotonic() < deadline and _answer(connection):
                        pass
            except OSError:
                return  # the other end left, or fell silent


def dial(source: str, endpoint: Endpoint, token: bytes) -> Link:
    """Connects to `endpoint` and measures; a failure is told in the link's `problem`."""
    link = Link(source=source, target=endpoint.node)
    place = (endpoint.host, endpoint.port)
    try:
        with socket.create_connection(place, timeout=CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S)
            _no_delay(connection)
            connection.sendall(token)
            return _measured(link, connection)
    except OSError as error:
        where = f"{endpoint.host}:{endpoint.port}"
        problem = f"{where}: {error.strerror or str(error) or type(error).__name__}"
        return Link(source=source, target=endpoint.node, problem=problem)


def _measured(link: Link, connection: socket.socket) -> Link:
    pings = [_ping(connection) for _ in range(NUM_PINGS)]
    fastest_s, offset_s = min(pings)
    return Link(
        source=link.source,
        target=link.target,
        latency_s=median(round_trip_s for round_trip_s, _ in pings),
        bytes_s=_throughput(connection),
        offset_s=offset_s,
        error_s=fastest_s / 2,
    )


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and how far the other clock is ahead in its middle."""
    began_s, wall_s = time.perf_counter(), time.time()
    connection.sendall(PING)
    (theirs_s,) = CLOCK.unpack(_read(connection, CLOCK.size))
    round_trip_s = time.perf_counter() - began_s
    return round_trip_s, theirs_s - (wall_s + round_trip_s / 2)


def _throughput(connection: socket.socket) -> float:
    """Bytes a second, until the last of them has been read at the other end."""
    message, num_bytes = DATA + bytes(CHUNK_BYTES), 0
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < SEND_S:
        connection.sendall(message)
        num_bytes += len(message)
    _ping(connection)
    return num_bytes / (time.perf_counter() - began_s)


def _answer(connection: socket.socket) -> bool:
    """Serves one request; False when the other end is done, or makes no sense."""
    request = connection.recv(1)
    if request == PING:
        connection.sendall(CLOCK.pack(time.time()))
    elif request == DATA:
        _read(connection, CHUNK_BYTES)
    return request in (PING, DATA)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many; raises ConnectionError where fewer come."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        num_read = connection.recv_into(view)
        if not num_read:
            raise ConnectionError("the other end closed the connection")
        view = view[num_read:]
    return bytes(data)


def _no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
