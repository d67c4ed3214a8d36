"""Callers that leave, a pipeline that is lost, a server that closes, a port that is taken."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orca_dist.client import AsyncClient, Chunk, ServerUnavailable
from orca_dist.config import ServerConfig
from orca_dist.errors import ConfigError, OrcaError, PipelineLost, ServerClosing, StartupError
from orca_dist.params import SamplingParams
from orca_dist.server import listen
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.front import run, serving
from tests.fixtures.scripted_engine import ScriptedEngine

PROMPT = [5]
SHORT = SamplingParams(max_tokens=3)
SERVICE = "orca.v1.GenerateService"
Leave = Callable[[AsyncClient], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path)


def long_engine() -> ScriptedEngine:
    """Answers that no test waits for the end of."""
    return ScriptedEngine(max_model_len=100_000)


# ---- callers that leave ------------------------------------------------


async def stop_reading(client: AsyncClient) -> None:
    async with aclosing(client.stream(PROMPT)) as chunks:  # type: ignore[type-var]
        for _ in range(5):
            await anext(chunks)


async def cancel_unary(client: AsyncClient) -> None:
    call = asyncio.create_task(client.generate(PROMPT))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.wait([call])


async def pass_the_stream_deadline(client: AsyncClient) -> None:
    with pytest.raises(OrcaError, match="within the timeout"):
        async for _ in client.stream(PROMPT, timeout_s=0.1):
            pass


async def pass_the_unary_deadline(client: AsyncClient) -> None:
    with pytest.raises(OrcaError, match="within the timeout"):
        await client.generate(PROMPT, timeout_s=0.1)


async def hang_up_on_a_stream(client: AsyncClient) -> None:
    async with AsyncClient(client.address) as other:
        await anext(other.stream(PROMPT))


async def hang_up_on_a_unary_call(client: AsyncClient) -> None:
    async with AsyncClient(client.address) as other:
        call = asyncio.create_task(other.generate(PROMPT))
        await asyncio.sleep(0.1)
    await asyncio.wait([call])
    call.cancelled() or call.exception()


@pytest.mark.parametrize(
    "leave",
    [
        stop_reading,
        cancel_unary,
        pass_the_stream_deadline,
        pass_the_unary_deadline,
        hang_up_on_a_stream,
        hang_up_on_a_unary_call,
    ],
)
def test_a_caller_that_leaves_takes_its_request_along_exactly_once(
    folder: Path, leave: Leave
) -> None:
    async def case() -> None:
        engine = long_engine()
        async with serving(engine, folder) as (_, client):
            neighbour = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=200)))
            await asyncio.to_thread(engine.wait_for, lambda: len(engine.submitted) == 1)
            await leave(client)
            assert await asyncio.to_thread(engine.wait_for, lambda: bool(engine.cancelled))
            assert (await neighbour).usage.completion_tokens == 200
            await client.generate(PROMPT, SHORT)
            assert engine.cancelled == [engine.submitted[1].id]
            assert engine.num_live == 0

    run(case())


def test_a_queued_unary_call_can_leave(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(paused=True)
        async with serving(engine, folder) as (_, client):
            await pass_the_unary_deadline(client)
            assert await asyncio.to_thread(engine.wait_for, lambda: bool(engine.cancelled))
            assert engine.num_live == 0

    run(case())


def test_many_that_leave_hold_no_place_in_the_queue(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(paused=True)
        async with serving(engine, folder, max_queue=1) as (_, client):
            for index in range(30):
                call = asyncio.create_task(client.generate(PROMPT, request_id="same"))
                await asyncio.to_thread(
                    engine.wait_for, lambda n=index + 1: len(engine.submitted) == n
                )
                call.cancel()
                await asyncio.to_thread(
                    engine.wait_for, lambda n=index + 1: len(engine.cancelled) == n
                )
            engine.resume()
            await client.generate(PROMPT, SHORT, request_id="same")
        assert len(set(engine.cancelled)) == 30

    run(case())


def test_a_request_that_ended_is_not_cancelled(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with serving(engine, folder) as (_, client):
            await client.generate(PROMPT, SHORT)
            chunks = [chunk async for chunk in client.stream(PROMPT, SHORT)]
            assert sum(len(chunk.token_ids) for chunk in chunks) == 3
        assert engine.cancelled == []

    run(case())


# ---- the pipeline is lost ----------------------------------------------


async def watch(address: str) -> AsyncIterator[int]:
    """The health service's own stream of states."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
            yield answer.status


async def read_all(chunks: AsyncIterator[Chunk]) -> None:
    async for _ in chunks:
        pass


def test_a_lost_pipeline_ends_every_call_and_the_health(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000, max_running=2)
        async with serving(engine, folder) as (server, client):
            states = watch(server.address)
            assert await anext(states) == health_pb2.HealthCheckResponse.SERVING
            calls = [asyncio.ensure_future(read_all(client.stream(PROMPT))) for _ in range(3)]
            calls += [asyncio.ensure_future(client.generate(PROMPT)) for _ in range(2)]
            await asyncio.to_thread(engine.wait_for, lambda: len(engine.submitted) == 5)
            engine.lose("stage 1 is lost: killed")
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(end) for end in ends} == {PipelineLost}
            assert {str(end) for end in ends} == {"stage 1 is lost: killed"}
            assert await anext(states) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not await client.health()
            assert not await client.health(SERVICE)
            for call in (client.generate(PROMPT), client.info()):
                with pytest.raises(PipelineLost, match="stage 1 is lost"):
                    await call
            assert str(await server.wait_lost()) == "stage 1 is lost: killed"
            assert len(engine.submitted) == 5

    run(case())


# ---- the server closes -------------------------------------------------


def test_closing_ends_running_calls_with_unavailable(folder: Path) -> None:
    async def case() -> None:
        engine = long_engine()
        async with serving(engine, folder) as (server, client):
            chunks = client.stream(PROMPT)
            await anext(chunks)
            calls = [
                asyncio.ensure_future(read_all(chunks)),
                asyncio.ensure_future(client.generate(PROMPT)),
            ]
            await asyncio.to_thread(engine.wait_for, lambda: len(engine.submitted) == 2)
            await server.stop(0.1)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(end) for end in ends} == {ServerClosing}
            assert str(ends[0]) == "the answer was cut off: the server is shutting down"
            assert len(engine.cancelled) == 2

    run(case())


def test_closing_lets_calls_end_within_the_grace_but_takes_no_new_ones(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(paused=True)
        async with serving(engine, folder) as (server, client):
            call = asyncio.create_task(client.generate(PROMPT, SHORT))
            await asyncio.to_thread(engine.wait_for, lambda: len(engine.submitted) == 1)
            closing = asyncio.create_task(server.stop(10.0))
            while await client.health():
                pass
            with pytest.raises(ServerUnavailable, match="shutting down"):
                await client.generate(PROMPT)
            engine.resume()
            assert (await call).usage.completion_tokens == 3
            await closing
        assert engine.cancelled == []

    run(case())


# ---- the port ----------------------------------------------------------


def test_a_port_in_use_is_named(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (server, _):
            port = int(server.address.rpartition(":")[2])
            with pytest.raises(StartupError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
                await listen(ServerConfig(port=port))

    run(case())


def test_a_taken_port_is_held_before_anything_is_served() -> None:
    async def case() -> None:
        listener = await listen(ServerConfig(port=0))
        port = int(listener.address.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        await listener.server.stop(None)

    run(case())


@pytest.mark.parametrize(
    ("host", "port", "kind", "message"),
    [
        ("127.0.0.1", 70_000, ConfigError, r"port = 70000: must be in 0\.\.65535"),
        ("192.0.2.1", 0, StartupError, r"192\.0\.2\.1:0: Cannot assign"),
        ("no.such.host.invalid", 0, StartupError, r"no\.such\.host\.invalid:0"),
    ],
)
def test_an_address_that_cannot_be_had_is_named(
    host: str, port: int, kind: type[OrcaError], message: str
) -> None:
    async def case() -> None:
        with pytest.raises(kind, match=message):
            await listen(ServerConfig(host=host, port=port))

    run(case())
