"""What one connection may ask for: streams at once, bytes in a message, time of the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from orca_dist.client import AsyncClient
from orca_dist.config import ServerConfig
from orca_dist.errors import ConfigError, InvalidRequest
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.proto.v1 import generate_pb2_grpc
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.front import run, server_of
from tests.fixtures.scripted_engine import ScriptedEngine

PROMPT = [5]
LONG_ID = "x" * 256  # each chunk repeats it: a window is full soon
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path)


def test_a_reader_that_does_not_read_is_waited_for_by_nobody(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with (
            server_of(engine, folder, ServerConfig(port=0)) as server,
            AsyncClient(server.address) as others,
            grpc.aio.insecure_channel(server.address, options=SMALL_WINDOW) as channel,
        ):
            request = pb.GenerateRequest(
                request_id=LONG_ID,
                token_ids=pb.TokenIds(ids=PROMPT),
                sampling=pb.SamplingParams(max_tokens=1000),
            )
            lazy = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request)
            first = await lazy.read()
            answer = await others.generate(PROMPT, SamplingParams(max_tokens=250))
            assert answer.usage.completion_tokens == 250
            assert await others.health()
            assert await asyncio.to_thread(engine.wait_for, lambda: engine.num_live == 0)
            chunks = [first]
            while (chunk := await lazy.read()) is not grpc.aio.EOF:
                chunks.append(chunk)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 1000
        assert len(chunks) < 700  # what came while it did not read was joined
        assert chunks[-1].usage.completion_tokens == 1000

    run(case())


def test_a_reader_that_leaves_while_it_is_written_to_is_no_failure_of_ours(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with server_of(engine, folder, ServerConfig(port=0)) as server:
            async with grpc.aio.insecure_channel(server.address, options=SMALL_WINDOW) as channel:
                request = pb.GenerateRequest(request_id=LONG_ID, token_ids=pb.TokenIds(ids=PROMPT))
                lazy = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request)
                await lazy.read()
                async with AsyncClient(server.address) as others:  # meanwhile the window fills up
                    await others.generate(PROMPT, SamplingParams(max_tokens=250))
            assert await asyncio.to_thread(engine.wait_for, lambda: engine.num_live == 0)

    run(case())
    assert caplog.text == ""


def test_a_reader_that_does_not_read_holds_up_no_end(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with (
            server_of(engine, folder, ServerConfig(port=0)) as server,
            grpc.aio.insecure_channel(server.address, options=SMALL_WINDOW) as channel,
        ):
            request = pb.GenerateRequest(request_id=LONG_ID, token_ids=pb.TokenIds(ids=PROMPT))
            lazy = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request)
            await lazy.read()
            async with AsyncClient(server.address) as others:  # meanwhile the window fills up
                await others.generate(PROMPT, SamplingParams(max_tokens=250))
            await asyncio.wait_for(server.stop(0.1), 10.0)
            assert engine.num_live == 0

    run(case())


def test_a_connection_has_so_many_streams_and_the_next_call_waits(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        config = ServerConfig(port=0, max_streams=2)
        async with (
            server_of(engine, folder, config) as server,
            AsyncClient(server.address) as client,
            AsyncClient(server.address) as another,
        ):
            streams = [client.stream(PROMPT) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            third = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=1)))
            await another.generate(PROMPT, SamplingParams(max_tokens=50))
            assert not third.done()
            assert len(engine.submitted) == 3
            await streams[0].aclose()  # type: ignore[attr-defined]
            assert (await third).usage.completion_tokens == 1

    run(case())


@pytest.mark.parametrize(("num_ids", "fits"), [(1000, True), (60_000, False)])
def test_a_message_beyond_the_limit_is_refused_before_it_is_read(
    folder: Path, num_ids: int, fits: bool
) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        config = ServerConfig(port=0, max_request_bytes=65_536)
        async with (
            server_of(engine, folder, config, max_queue_tokens=100_000) as server,
            AsyncClient(server.address) as client,
        ):
            call = client.generate([300] * num_ids, SamplingParams(max_tokens=1))
            if fits:
                await call
            else:
                with pytest.raises(InvalidRequest, match="65536"):
                    await call
            await client.generate(PROMPT, SamplingParams(max_tokens=1))

    run(case())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_streams", 0),
        ("max_request_bytes", 0),
        ("max_request_bytes", 2**31),
        ("drain_s", -1.0),
        ("drain_s", float("nan")),
        ("drain_s", float("inf")),
        ("port", -1),
    ],
)
def test_a_limit_out_of_its_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = {value}: must be"):
        ServerConfig(**{name: value}).check()  # type: ignore[arg-type]
