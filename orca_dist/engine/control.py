"""The master's end of the control streams: it listens, stages dial in.

Messages to all stages are encoded once and the same bytes go to each. Knows who
is connected; what the messages mean is the pipeline's business. A stream whose
hello doesn't carry the run's secret is refused.
"""

from __future__ import annotations

import hmac
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from orca_dist.bootstrap import SECRET_HEADER
from orca_dist.errors import StartupError
from orca_dist.proto.v1 import control_pb2 as pb

SERVICE = "orca.control.v1.ControlService"
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

Outbox = queue.SimpleQueue[bytes | None]
OnMessage = Callable[[int, pb.StageMessage], None]
OnBroken = Callable[[int, str], None]


class ControlPlane:
    """One stream a stage. Callbacks come on the streams' own threads and must not block."""

    def __init__(
        self, *, host: str, secret: str, num_stages: int, on_message: OnMessage, on_broken: OnBroken
    ) -> None:
        self._secret = secret
        self._on_message = on_message
        self._on_broken = on_broken
        self._outboxes: list[Outbox] = [queue.SimpleQueue() for _ in range(num_stages)]
        self._connected: set[int] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._server, self.address = self._listen(host)

    def send(self, stage: int, message: pb.MasterMessage) -> None:
        self._outboxes[stage].put(message.SerializeToString())

    def broadcast(self, payload: bytes) -> None:
        """The same encoded MasterMessage to every stage."""
        for outbox in self._outboxes:
            outbox.put(payload)

    def expect_anew(self, stage: int) -> None:
        """A replacement of this stage will dial in; of the one before nothing is heard any more."""
        with self._lock:
            self._outboxes[stage].put(None)
            self._outboxes[stage] = queue.SimpleQueue()
            self._connected.discard(stage)

    def close(self, grace_s: float) -> None:
        """Send what is queued, then end all streams; any number of times."""
        self._closing = True
        for outbox in self._outboxes:
            outbox.put(None)
        self._server.stop(grace_s).wait()

    def _listen(self, host: str) -> tuple[grpc.Server, str]:
        server = grpc.server(_DaemonThreads(), options=OPTIONS)
        connect = grpc.stream_stream_rpc_method_handler(self._connect)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Connect": connect}),)
        )
        try:
            port = server.add_insecure_port(f"{host}:0")
        except RuntimeError as error:
            raise StartupError(f"the control plane can't listen on {host}: {error}") from None
        server.start()
        return server, f"{host}:{port}"

    def _connect(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._is_ours(context):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "wrong run secret")
        first = _parsed(next(messages, b""))
        stage, outbox = self._welcome(first, context)
        self._on_message(stage, first)
        threading.Thread(target=self._read, args=(stage, outbox, messages), daemon=True).start()
        yield from iter(outbox.get, None)

    def _is_ours(self, context: grpc.ServicerContext) -> bool:
        given = dict(context.invocation_metadata()).get(SECRET_HEADER, b"")
        return hmac.compare_digest(given, self._secret.encode())

    def _welcome(self, first: pb.StageMessage, context: grpc.ServicerContext) -> tuple[int, Outbox]:
        """The stage number of a proper hello and what is for it; anything else ends the stream."""
        if first.WhichOneof("kind") != "hello":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stage says hello first")
        stage = first.hello.stage
        with self._lock:
            if stage >= len(self._outboxes) or stage in self._connected:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"stage {stage} is taken")
            self._connected.add(stage)
            return int(stage), self._outboxes[stage]

    def _read(self, stage: int, outbox: Outbox, messages: Iterator[bytes]) -> None:
        try:
            for data in messages:
                message = pb.StageMessage.FromString(data)
                with self._lock:  # else it could be told after expect_anew()
                    if self._outboxes[stage] is outbox:
                        self._on_message(stage, message)
        except (grpc.RpcError, DecodeError):
            pass
        finally:
            outbox.put(None)
        with self._lock:
            if not self._closing and self._outboxes[stage] is outbox:
                self._on_broken(stage, "its control stream broke")


def _parsed(first: bytes) -> pb.StageMessage:
    """An empty message for bytes that are none."""
    try:
        return pb.StageMessage.FromString(first)
    except DecodeError:
        return pb.StageMessage()


class _DaemonThreads(Executor):
    """A thread a call: a stream holds its thread for life, so a pool could be filled up.

    They are daemons: a program that forgot to close its engine must still come to its end,
    which an executor's own threads would hold up.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  the thread's root: the future has it
                future.set_exception(error)

        threading.Thread(target=run, name="control-stream", daemon=True).start()
        return future
