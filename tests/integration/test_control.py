"""The control plane over real gRPC: who is let in, what arrives, and how an end is noticed."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import grpc
import psutil
import pytest

from orca_dist.bootstrap import SECRET_HEADER, StageBootstrap
from orca_dist.engine.control import ControlPlane
from orca_dist.errors import StartupError
from orca_dist.proto.v1 import control_pb2 as pb
from orca_dist.proto.v1.control_pb2_grpc import ControlServiceStub
from orca_dist.stage.control import ControlLink
from orca_dist.versions import software_versions
from tests.fixtures.control import SECRET, WAIT_S, Master, dial


@pytest.fixture
def master() -> Iterator[Master]:
    with Master.started() as master:
        yield master


def refusal(
    address: str, first: pb.StageMessage | None, *, secret: str = SECRET
) -> tuple[grpc.StatusCode, str]:
    """How a stream that begins with `first` ends."""
    with grpc.insecure_channel(address) as channel:
        stub = ControlServiceStub(channel)
        answers = stub.Connect(
            iter([first] if first else []),
            timeout=WAIT_S,
            metadata=((SECRET_HEADER, secret.encode()),),
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
    return caught.value.code(), caught.value.details()


def ping(nonce: int) -> pb.MasterMessage:
    return pb.MasterMessage(ping=pb.Ping(nonce=nonce))


# ---- who is let in -----------------------------------------------------


def test_a_hello_says_who_the_stage_is(master: Master) -> None:
    link = dial(master.plane.address, 2)
    stage, message = master.messages.get(timeout=WAIT_S)
    link.close()
    said = message.hello
    assert (stage, said.stage, said.actor_id, said.host) == (2, 2, "aa", "127.0.0.9")
    assert said.pid == psutil.Process().pid
    assert said.versions == software_versions()


@pytest.mark.parametrize("secret", ["", "open", SECRET + " ", SECRET.upper(), "größe"])
def test_a_wrong_secret_is_refused(master: Master, secret: str) -> None:
    first = pb.StageMessage(hello=pb.Hello(stage=1))
    code, details = refusal(master.plane.address, first, secret=secret)
    assert (code, details) == (grpc.StatusCode.PERMISSION_DENIED, "wrong run secret")
    assert SECRET not in details
    nothing_told(master)
    master.connect(1)


@pytest.mark.parametrize(
    "first", [None, pb.StageMessage(), pb.StageMessage(ready=pb.Ready())], ids=str
)
def test_a_stream_must_begin_with_hello(master: Master, first: pb.StageMessage | None) -> None:
    assert refusal(master.plane.address, first)[0] is grpc.StatusCode.INVALID_ARGUMENT
    nothing_told(master)
    master.connect(0)


def test_a_strangers_messages_are_not_waited_for(master: Master) -> None:
    """Nor read: what it would send could be large."""
    never: queue.SimpleQueue[pb.StageMessage | None] = queue.SimpleQueue()
    with grpc.insecure_channel(master.plane.address) as channel:
        call = ControlServiceStub(channel).Connect(iter(never.get, None), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        never.put(None)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    nothing_told(master)


def nothing_told(master: Master) -> None:
    assert master.messages.empty()
    assert master.broken.empty()


def test_a_stage_number_is_taken_once(master: Master) -> None:
    link = master.connect(1)
    second = pb.StageMessage(hello=pb.Hello(stage=1))
    assert refusal(master.plane.address, second)[0] is grpc.StatusCode.ALREADY_EXISTS
    nothing_told(master)
    master.plane.send(1, ping(5))
    assert next(link.messages()).ping.nonce == 5


@pytest.mark.parametrize("stage", [3, 2**32 - 1])
def test_a_stage_number_beyond_the_pipeline_is_refused(master: Master, stage: int) -> None:
    first = pb.StageMessage(hello=pb.Hello(stage=stage))
    assert refusal(master.plane.address, first)[0] is grpc.StatusCode.ALREADY_EXISTS
    nothing_told(master)


def test_strangers_leave_room_for_the_stages(master: Master) -> None:
    """Refused streams don't hold a thread: the stages still get in."""
    wrong = pb.StageMessage(hello=pb.Hello(stage=0))
    for _ in range(12):
        refusal(master.plane.address, wrong, secret="no")
    for stage in range(3):
        master.connect(stage)


def test_an_address_that_cannot_be_had_is_named() -> None:
    with pytest.raises(StartupError, match=r"can't listen on 203\.0\.113\.1"):
        ControlPlane(
            host="203.0.113.1",
            secret=SECRET,
            num_stages=1,
            on_message=lambda stage, message: None,
            on_broken=lambda stage, why: None,
        )


def test_it_listens_on_its_own_address_alone(master: Master) -> None:
    port = int(master.plane.address.rpartition(":")[2])
    connections = psutil.Process().net_connections(kind="inet")
    listeners = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    own = [ip.removeprefix("::ffff:") for ip, own_port in listeners if own_port == port]
    assert own == ["127.0.0.1"]


# ---- what arrives ------------------------------------------------------


def test_messages_of_a_stage_arrive_in_order_under_its_number(master: Master) -> None:
    links = [master.connect(stage) for stage in range(3)]
    for nonce in range(50):
        links[nonce % 3].send(pb.StageMessage(pong=pb.Pong(nonce=nonce)))
    got = [master.messages.get(timeout=WAIT_S) for _ in range(50)]
    for stage in range(3):
        nonces = [message.pong.nonce for at, message in got if at == stage]
        assert nonces == list(range(stage, 50, 3))


def test_a_message_goes_to_its_stage_and_a_broadcast_to_all(master: Master) -> None:
    links = [master.connect(stage) for stage in range(3)]
    master.plane.send(1, ping(7))
    master.plane.broadcast(ping(8).SerializeToString())
    master.plane.send(2, ping(9))
    received = [link.messages() for link in links]
    assert [next(messages).ping.nonce for messages in received] == [8, 7, 8]
    assert next(received[1]).ping.nonce == 8
    assert next(received[2]).ping.nonce == 9


def test_what_was_sent_before_the_stage_came_waits_for_it(master: Master) -> None:
    master.plane.send(0, ping(1))
    assert next(master.connect(0).messages()).ping.nonce == 1


def test_a_large_message_passes_both_ways(master: Master) -> None:
    """A plan of many long prompts, and logits: beyond gRPC's default of 4 MiB."""
    link = master.connect(0)
    tokens = [300] * 3_000_000
    plan = pb.Plan(admits=[pb.Admit(id=1, tokens=tokens)])
    master.plane.send(0, pb.MasterMessage(plan=plan))
    assert len(next(link.messages()).plan.admits[0].tokens) == len(tokens)
    link.send(pb.StageMessage(result=pb.Result(logits=[pb.Logits(rows=bytes(6_000_000))])))
    _, message = master.messages.get(timeout=WAIT_S)
    assert len(message.result.logits[0].rows) == 6_000_000


# ---- ends --------------------------------------------------------------


def test_a_stage_that_hangs_up_is_noticed(master: Master) -> None:
    links = [master.connect(stage) for stage in range(3)]
    links[1].close()
    assert master.broken.get(timeout=WAIT_S) == (1, "its control stream broke")
    master.plane.send(2, ping(3))
    assert next(links[2].messages()).ping.nonce == 3
    assert master.broken.empty()


def test_once_a_replacement_is_expected_nothing_is_told_of_the_stage_before() -> None:
    """What is being told at that moment is waited for: it would pass for the new one's loss."""
    here, telling, go = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def on_broken(stage: int, why: str) -> None:
        telling.set()
        assert go.wait(WAIT_S)
        order.append(f"stage {stage} broke")

    plane = ControlPlane(
        host="127.0.0.1",
        secret=SECRET,
        num_stages=1,
        on_message=lambda stage, message: here.set(),
        on_broken=on_broken,
    )
    link = dial(plane.address, 0)
    assert here.wait(WAIT_S)
    link.close()
    assert telling.wait(WAIT_S)
    replacing = threading.Thread(target=lambda: (plane.expect_anew(0), order.append("replaced")))  # type: ignore[func-returns-value]
    replacing.start()
    replacing.join(0.2)
    assert replacing.is_alive()
    go.set()
    replacing.join(WAIT_S)
    plane.close(grace_s=0.0)
    assert order == ["stage 0 broke", "replaced"]


def test_a_stage_does_not_come_back_under_its_number(master: Master) -> None:
    """A lost stage ends the epoch: it isn't replaced behind the master's back."""
    master.connect(0).close()
    master.broken.get(timeout=WAIT_S)
    again = pb.StageMessage(hello=pb.Hello(stage=0))
    assert refusal(master.plane.address, again)[0] is grpc.StatusCode.ALREADY_EXISTS


def test_close_sends_what_is_queued_and_is_no_break(master: Master) -> None:
    links = [master.connect(stage) for stage in range(3)]
    for nonce in range(20):
        master.plane.broadcast(ping(nonce).SerializeToString())
    for _ in range(3):
        master.plane.close(grace_s=WAIT_S)
    for link in links:
        assert [message.ping.nonce for message in link.messages()] == list(range(20))
    assert master.broken.empty()


def test_a_refused_stage_sees_its_stream_end(master: Master) -> None:
    link = dial(master.plane.address, 0, secret="wrong")
    assert list(link.messages()) == []
    link.close()


def test_a_stage_without_a_master_gives_up() -> None:
    """A master that died before its stages came must not leave them behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    bootstrap = StageBootstrap(stage=0, control_address=address, secret=SECRET)
    with pytest.raises(ConnectionError, match=rf"{address} did not answer within 0\.3 s"):
        ControlLink(bootstrap, connect_timeout_s=0.3)


def test_strangers_that_say_nothing_keep_no_stage_out(master: Master) -> None:
    channel = grpc.insecure_channel(master.plane.address)
    never: queue.SimpleQueue[pb.StageMessage | None] = queue.SimpleQueue()
    strangers = [ControlServiceStub(channel).Connect(iter(never.get, None)) for _ in range(20)]
    link = master.connect(1)
    link.close()
    for stranger in strangers:
        stranger.cancel()
        never.put(None)
    channel.close()


def test_what_a_stage_is_told_shows_no_secret() -> None:
    bootstrap = StageBootstrap(stage=0, control_address="127.0.0.1:1", secret=SECRET)
    assert SECRET not in repr(bootstrap)
