"""The stage's end of the control stream: dials the engine master and stays on the line.

Knows the protocol's order (hello, setup, open, plans), not what a stage does.
"""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator

import grpc

from orca_dist.bootstrap import SECRET_HEADER, StageBootstrap
from orca_dist.proto.v1.control_pb2 import Hello, MasterMessage, StageMessage
from orca_dist.proto.v1.control_pb2_grpc import ControlServiceStub
from orca_dist.versions import software_versions

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
CONNECT_TIMEOUT_S = 30.0


class ControlLink:
    """One stream for the stage's whole life. send() is thread-safe and returns at once."""

    def __init__(
        self, bootstrap: StageBootstrap, *, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Raises ConnectionError where no master answers: a stage must not outlive its own."""
        self._outbox: queue.SimpleQueue[StageMessage | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(bootstrap.control_address, options=CHANNEL_OPTIONS)
        _await_ready(self._channel, bootstrap.control_address, connect_timeout_s)
        stub = ControlServiceStub(self._channel)
        proof = ((SECRET_HEADER, bootstrap.secret.encode()),)
        self._incoming = stub.Connect(iter(self._outbox.get, None), metadata=proof)

    def send(self, message: StageMessage) -> None:
        self._outbox.put(message)

    def messages(self) -> Iterator[MasterMessage]:
        """The master's messages; ends when the stream does, for whatever reason."""
        try:
            yield from self._incoming
        except grpc.RpcError:
            return

    def close(self) -> None:
        """Hang up; what is still on its way is lost."""
        self._outbox.put(None)
        self._channel.close()


def _await_ready(channel: grpc.Channel, address: str, timeout_s: float) -> None:
    try:
        grpc.channel_ready_future(channel).result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        channel.close()
        raise ConnectionError(
            f"the engine master at {address} did not answer within {timeout_s:g} s"
        ) from None


def hello(bootstrap: StageBootstrap, *, actor_id: str) -> StageMessage:
    """Who this stage is, for the master's books and logs."""
    return StageMessage(
        hello=Hello(
            stage=bootstrap.stage,
            pid=os.getpid(),
            node=socket.gethostname(),
            actor_id=actor_id,
            versions=software_versions(),
            host=bootstrap.host,
            gpus=bootstrap.gpus,
        )
    )
