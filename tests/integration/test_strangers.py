"""What strangers say to the ports between master and stages disturbs no answer."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import grpc
import psutil
import pytest

from orca_dist.bootstrap import SECRET_HEADER
from orca_dist.proto.v1 import control_pb2 as pb
from orca_dist.proto.v1.control_pb2_grpc import ControlServiceStub
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config

PROMPT = [5, 9, 17]
NUM_TOKENS = 60
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # what every gRPC connection begins with
TIMEOUT_S = 5.0


def own_ports() -> set[int]:
    connections = psutil.Process().net_connections()
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Where this process listens for other tests' sake."""
    return own_ports()


@pytest.fixture(scope="module")
def front(others: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = loud_llama(tmp_path_factory.mktemp("loud"))
    with live(folder, local_config(3)) as front:
        yield front


def ports(front: Front) -> list[tuple[str, int]]:
    """Where the master and its stages listen: control, rendezvous, and the links' own."""
    processes = [psutil.Process(), *(psutil.Process(s.pid) for s in front.engine.info().stages)]
    found = {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    return sorted(found)


def noise(seed: int) -> Iterator[bytes]:
    """What no partner of ours would say: nothing at all, random bytes, lengths beyond reason."""
    rng = random.Random(seed)
    yield b""
    yield rng.randbytes(1)
    yield rng.randbytes(100_000)
    yield HTTP2 + rng.randbytes(1000)
    yield HTTP2 + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + rng.randbytes(5000)
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\xff" * 64
    yield (2**63).to_bytes(8, "little") * 8
    yield b"\x00" * 4096


def say(address: tuple[str, int], data: bytes) -> None:
    """And hang up without waiting for an answer."""
    with suppress(OSError), socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(data)


def test_nothing_listens_beyond_this_machine(front: Front) -> None:
    assert len(ports(front)) >= 2  # the control stream's and the rendezvous'
    assert {ip for ip, _ in ports(front)} == {"127.0.0.1"}


def test_noise_on_every_port_disturbs_no_answer(front: Front) -> None:
    (expected,) = front.generate([PROMPT], NUM_TOKENS)
    pids = [stage.pid for stage in front.engine.info().stages]
    request = front.submit(PROMPT, NUM_TOKENS)
    for seed, address in enumerate(ports(front)):
        for data in noise(seed):
            say(address, data)
    (answer,) = front.wait([request])
    assert answer.tokens == expected.tokens
    (later,) = front.generate([PROMPT], NUM_TOKENS)
    assert later.tokens == expected.tokens
    info = front.engine.info()
    assert info.epoch == 1
    assert [stage.pid for stage in info.stages] == pids


@pytest.mark.parametrize("secret", ["", "0" * 32])
def test_a_stranger_can_not_pass_for_a_stage(front: Front, others: set[int], secret: str) -> None:
    """Nor end one's stream, whatever stage and epoch it names."""
    (expected,) = front.generate([PROMPT], NUM_TOKENS)
    control_ports = own_ports() - others
    assert control_ports
    for port in control_ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            first = pb.StageMessage(epoch=7, hello=pb.Hello(stage=1))
            result = pb.StageMessage(epoch=1, result=pb.Result(seq=10**6))
            call = ControlServiceStub(channel).Connect(
                iter([first, result]),
                timeout=TIMEOUT_S,
                metadata=((SECRET_HEADER, secret.encode()),),
            )
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
            assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    (answer,) = front.generate([PROMPT], NUM_TOKENS)
    assert answer.tokens == expected.tokens
    assert front.engine.info().epoch == 1
