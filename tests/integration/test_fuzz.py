"""Hostile messages to the public and to the control port: refused one by one, nobody else is hurt.

FUZZ_REQUESTS sets how many go to each test; FUZZ_SEED where the random ones begin.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_dist.bootstrap import SECRET_HEADER
from orca_dist.client import AsyncClient
from orca_dist.config import ServerConfig
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import control_pb2, generate_pb2
from orca_dist.proto.v1 import generate_pb2 as pb
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.control import SECRET, Master
from tests.fixtures.front import CHAT_TEMPLATE, server_of
from tests.fixtures.scripted_engine import FAILING, ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "2000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
AT_ONCE = 100
SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"]
CONNECT = "/orca.control.v1.ControlService/Connect"
TIMEOUT_S = 20.0
FINE = {  # everything but INTERNAL and UNKNOWN, UNAVAILABLE and UNIMPLEMENTED
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}


class Target:
    """A real server around a scripted engine, on a loop that runs while it is asked something."""

    def __init__(self, folder: Path) -> None:
        self.seen: Counter[grpc.StatusCode] = Counter()
        self._folder = byte_tokenizer(folder, chat_template=CHAT_TEMPLATE)
        self._runner = asyncio.Runner()
        self.engine = ScriptedEngine(max_running=1000)

    def __enter__(self) -> Target:
        self._serving = server_of(self.engine, self._folder, ServerConfig(port=0), max_queue=1000)
        server = self._runner.run(self._serving.__aenter__())
        self._channel = self._runner.run(_channel(server.address))
        self._client = self._runner.run(_client(server.address))
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._client.close())
        self._runner.run(self._channel.close())
        self._runner.run(self._serving.__aexit__(None, None, None))
        self._runner.close()

    def ask(self, calls: list[tuple[str, bytes]]) -> None:
        """All at once: method and bytes each; then a good request has its right answer."""
        self._runner.run(self._ask(calls))

    async def _ask(self, calls: list[tuple[str, bytes]]) -> None:
        self.seen.update(await asyncio.gather(*[self._call(*call) for call in calls]))
        answer = await self._client.generate([5], SamplingParams(max_tokens=3))
        assert answer.token_ids == (263, 263, 263)
        assert set(self.seen) <= FINE, self.seen
        assert self.engine.num_live == 0

    async def _call(self, method: str, data: bytes) -> grpc.StatusCode:
        path = f"/{SERVICE.full_name}/{method}"
        try:
            if SERVICE.methods_by_name[method].server_streaming:
                async for _ in self._channel.unary_stream(path)(data, timeout=TIMEOUT_S):
                    pass
            else:
                await self._channel.unary_unary(path)(data, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


async def _client(address: str) -> AsyncClient:
    return AsyncClient(address)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("fuzz")) as target:
        yield target
        print(f"\nstatuses: { {code.name: n for code, n in target.seen.most_common()} }")


# ---- bytes -------------------------------------------------------------


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A message with some of it flipped, cut, doubled or inserted."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(changed))
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                changed += changed[at:]
            case _:
                changed[at:at] = b"\xff" * rng.randint(1, 12)
    return bytes(changed)


GOOD: dict[str, list[Message]] = {
    "Generate": [
        pb.GenerateRequest(
            request_id="a",
            token_ids=pb.TokenIds(ids=[5, 9, 17]),
            sampling=pb.SamplingParams(max_tokens=3, top_p=0.5, seed=7, stop=["x"]),
        ),
        pb.GenerateRequest(text="AB", sampling=pb.SamplingParams(max_tokens=2)),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="A")])),
    ],
    "Abort": [pb.AbortRequest(request_id="a")],
    "Tokenize": [pb.TokenizeRequest(text="AB")],
    "ServerInfo": [pb.ServerInfoRequest()],
    "ModelInfo": [pb.ModelInfoRequest()],
}
GOOD["GenerateStream"] = GOOD["Generate"]


def some_bytes(good: list[Message], rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(rng.choice((0, 1, 3, 10, 100, 3000)))
    return mutated(rng.choice(good).SerializeToString(), rng)


def test_bytes_of_any_kind_to_the_public_port(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(SEED)
    methods = sorted(GOOD)
    for begin in range(0, NUM_REQUESTS, AT_ONCE):
        chosen = [rng.choice(methods) for _ in range(min(AT_ONCE, NUM_REQUESTS - begin))]
        target.ask([(method, some_bytes(GOOD[method], rng)) for method in chosen])
    assert target.seen[grpc.StatusCode.INVALID_ARGUMENT] > NUM_REQUESTS / 10
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


# ---- requests ----------------------------------------------------------

SOME_FLOATS = st.sampled_from([0.0, 0.5, 1.0]) | st.floats()
SOME_TEXT = st.sampled_from(["A", "\0", "\u202e", "\U0001f642" * 99, "", "x" * 300]) | st.text()
SOME_INTS = st.integers(0, 64) | st.integers(-(2**63), 2**63 - 1)
SOME_IDS = st.lists(st.integers(0, FAILING - 1), max_size=80) | st.lists(SOME_INTS, max_size=5)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Every field at, around and far beyond its limits; several prompts, or none."""
    sampling = pb.SamplingParams(stop=draw(st.lists(SOME_TEXT, max_size=2)))
    for name in ("max_tokens", "top_k"):
        if draw(st.booleans()):
            setattr(sampling, name, draw(SOME_INTS))
    for name in ("temperature", "top_p", "min_p"):
        if draw(st.booleans()):
            setattr(sampling, name, draw(SOME_FLOATS))
    if draw(st.booleans()):
        sampling.seed = draw(st.integers(0, 2**64 - 1))
    request = pb.GenerateRequest(
        request_id=draw(st.just("") | SOME_TEXT),
        sampling=sampling,
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
    )
    kind = st.sampled_from(["text", "token_ids", "chat"])
    kinds = draw(st.lists(kind, min_size=1, max_size=1) | st.lists(kind, max_size=3))
    if "text" in kinds:
        request.text = draw(SOME_TEXT)
    if "token_ids" in kinds:
        request.token_ids.ids.extend(draw(SOME_IDS))
    if "chat" in kinds:
        for role, content in draw(
            st.lists(st.tuples(st.just("user") | SOME_TEXT, SOME_TEXT), max_size=4)
        ):
            request.chat.messages.add(role=role, content=content)
        request.chat.SetInParent()
    return request.SerializeToString()


@settings(max_examples=max(1, NUM_REQUESTS // 20))
@given(
    batch=st.lists(
        st.tuples(st.sampled_from(["Generate", "GenerateStream"]), requests()),
        min_size=20,
        max_size=20,
    )
)
def test_requests_at_and_beyond_every_limit(target: Target, batch: list[tuple[str, bytes]]) -> None:
    target.ask(batch)


# ---- the control port --------------------------------------------------


def test_bytes_of_any_kind_to_the_control_port(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(SEED)
    hello = control_pb2.Hello(stage=1, pid=7, node="a")
    good: list[Message] = [control_pb2.StageMessage(hello=hello), control_pb2.StageMessage()]
    refused = Counter[grpc.StatusCode]()
    with Master.started() as master, grpc.insecure_channel(master.plane.address) as channel:
        links = [master.connect(stage) for stage in range(3)]
        connect = channel.stream_stream(CONNECT)
        for number in range(NUM_REQUESTS):
            data = [some_bytes(good, rng) for _ in range(rng.randint(0, 3))]
            given = rng.choice((SECRET.encode(), rng.randbytes(11), b""))
            proof = ((SECRET_HEADER, given),)
            with pytest.raises(grpc.RpcError) as raised:
                next(connect(iter(data), timeout=TIMEOUT_S, metadata=proof))
            refused[raised.value.code()] += 1
            if number % AT_ONCE == 0:
                links[number // AT_ONCE % 3].send(
                    control_pb2.StageMessage(pong=control_pb2.Pong(nonce=number))
                )
                stage, message = master.messages.get(timeout=TIMEOUT_S)
                assert (stage, message.pong.nonce) == (number // AT_ONCE % 3, number)
        assert master.broken.empty()
        assert master.messages.empty()
    assert set(refused) == {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,  # the secret alone makes no stage
        grpc.StatusCode.ALREADY_EXISTS,
    }
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
