"""The service's smaller calls over a real port: abort, tokenize, model info, reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from orca_dist.client import Client, ModelInfo
from orca_dist.errors import InvalidRequest, MissingCapability, RequestCancelled, UnknownRequest
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.proto.v1 import generate_pb2_grpc
from tests.fixtures.checkpoints import EOS, SPACE, byte_tokenizer, letter
from tests.fixtures.front import CHAT_TEMPLATE, run, serving
from tests.fixtures.scripted_engine import ScriptedEngine

PROMPT = [5]
SERVICES = {
    "orca.v1.GenerateService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path, chat_template=CHAT_TEMPLATE)


@asynccontextmanager
async def bare_stub(folder: Path) -> AsyncIterator[generate_pb2_grpc.GenerateServiceStub]:
    """The calls as gRPC has them, without our client."""
    async with (
        serving(ScriptedEngine(), folder) as (server, _),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield generate_pb2_grpc.GenerateServiceStub(channel)  # type: ignore[no-untyped-call]


# ---- abort -------------------------------------------------------------


def test_an_aborted_stream_ends_with_cancelled_and_its_neighbour_goes_on(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with serving(engine, folder) as (_, client):
            victim = client.stream(PROMPT, request_id="victim")
            other = client.stream(PROMPT, request_id="other")
            await anext(victim)
            await anext(other)
            await client.abort("victim")
            with pytest.raises(RequestCancelled, match="victim was cancelled"):
                async for _ in victim:
                    pass
            await anext(other)
            assert engine.cancelled == [engine.submitted[0].id]
            with pytest.raises(UnknownRequest, match="'victim'"):
                await client.abort("victim")
            await client.abort("other")

    run(case())


def test_a_waiting_request_and_one_named_by_the_server_can_be_aborted(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(paused=True)
        async with serving(engine, folder) as (_, client):
            call = asyncio.create_task(client.generate(PROMPT))
            await asyncio.to_thread(engine.wait_for, lambda: bool(engine.submitted))
            await client.abort("r1")
            with pytest.raises(RequestCancelled):
                await call
            assert engine.num_live == 0

    run(case())


@pytest.mark.parametrize("request_id", ["", "nobody"])
def test_an_id_that_is_not_live_is_not_found(folder: Path, request_id: str) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (_, client):
            await client.generate(PROMPT, SamplingParams(max_tokens=1), request_id="ended")
            for name in (request_id, "ended"):
                with pytest.raises(UnknownRequest):
                    await client.abort(name)

    run(case())


# ---- tokenize and model info -------------------------------------------


def test_tokenize_gives_the_ids_that_a_prompt_would_have(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        chat = [{"role": "user", "content": "BC"}]
        async with serving(engine, folder) as (_, client):
            for prompt in ("ABC", chat, "A" * 62):
                await client.generate(prompt, SamplingParams(max_tokens=1))
                assert engine.submitted[-1].prompt == await client.tokenize(prompt)
            assert await client.tokenize(chat) == (SPACE, *map(letter, "UBCA"))
            assert await client.tokenize(" ") == (SPACE, SPACE)
            assert len(await client.tokenize("A" * 10_000)) == 10_001  # no limit but the message's

    run(case())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.TokenizeRequest(), "prompt: set exactly one of text and chat, not none"),
        (
            pb.TokenizeRequest(text="A", chat=pb.Chat()),
            "prompt: set exactly one of text and chat, not text and chat",
        ),
        (pb.TokenizeRequest(chat=pb.Chat()), "chat: has no messages; give at least one"),
    ],
)
def test_what_tokenize_refuses(folder: Path, request_: pb.TokenizeRequest, message: str) -> None:
    async def case() -> None:
        async with bare_stub(folder) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Tokenize(request_)
        assert raised.value.details() == message
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(case())


def test_tokenize_of_ids_is_refused_by_the_client(folder: Path) -> None:
    with Client("host:1") as client, pytest.raises(InvalidRequest, match="not token ids"):
        client.tokenize([1, 2])  # type: ignore[list-item]


def test_the_count_is_that_of_the_ids(folder: Path) -> None:
    async def case() -> None:
        async with bare_stub(folder) as stub:
            answer = await stub.Tokenize(pb.TokenizeRequest(text="ABC"))
        assert (len(answer.token_ids), answer.count) == (4, 4)

    run(case())


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
def test_model_info(tmp_path: Path, template: str | None) -> None:
    async def case() -> None:
        folder = byte_tokenizer(tmp_path, chat_template=template)
        async with serving(ScriptedEngine(), folder) as (_, client):
            assert await client.model_info() == ModelInfo(
                name="tiny",
                vocab_size=315,
                max_model_len=64,
                eos_token_ids=(EOS,),
                has_chat_template=template is not None,
            )
            if template is None:
                with pytest.raises(MissingCapability):
                    await client.tokenize([{"role": "user", "content": "A"}])

    run(case())


def test_the_blocking_client_has_the_same_calls(folder: Path) -> None:
    def talk(address: str) -> None:
        with Client(address) as client:
            assert client.tokenize("AB") == (SPACE, *map(letter, "AB"))
            assert client.model_info().vocab_size == 315
            chunks = client.stream(PROMPT, request_id="mine")
            next(chunks)
            client.abort("mine")
            with pytest.raises(RequestCancelled):
                list(chunks)
            with pytest.raises(UnknownRequest):
                client.abort("mine")

    async def case() -> None:
        async with serving(ScriptedEngine(max_model_len=100_000), folder) as (server, _):
            await asyncio.to_thread(talk, server.address)

    run(case())


# ---- reflection and details --------------------------------------------


async def reflected(
    address: str, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield request

    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(requests()):
            return answer
    raise AssertionError("no answer")


def test_reflection_lists_the_services_and_describes_ours(folder: Path) -> None:
    async def case() -> None:
        ask = reflection_pb2.ServerReflectionRequest
        async with serving(ScriptedEngine(), folder) as (server, _):
            listed = await reflected(server.address, ask(list_services=""))
            described = await reflected(
                server.address, ask(file_containing_symbol="orca.v1.GenerateService")
            )
        names = {service.name for service in listed.list_services_response.service}
        assert names == SERVICES
        (file,) = described.file_descriptor_response.file_descriptor_proto
        assert b"include_stop" in file

    run(case())


def test_a_bad_field_is_told_as_a_field_violation(folder: Path) -> None:
    async def case() -> None:
        request = pb.GenerateRequest(text="A", sampling=pb.SamplingParams(top_p=7.0))
        async with bare_stub(folder) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Generate(request)
        status = rpc_status.from_call(raised.value)
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info)
        assert (info.domain, info.reason) == ("orca-dist", "invalid_request")
        assert status.details[1].Unpack(bad)
        (violation,) = bad.field_violations
        assert (violation.field, violation.description) == ("top_p", "7.0 is not in (0, 1]")

    run(case())


def test_a_message_of_any_length_reaches_the_client(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (_, client):
            with pytest.raises(InvalidRequest, match="the role '🙂") as raised:
                await client.generate([{"role": "🙂" * 20_000, "content": "A"}])
            assert raised.value.field == "chat"

    run(case())
