"""What the service refuses, and what it serves at the very limit; the engine must not notice."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest

from orca_dist.core import FinishReason
from orca_dist.errors import InvalidRequest
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.server import convert
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.front import CHAT_TEMPLATE, run, serving
from tests.fixtures.scripted_engine import ScriptedEngine

PROMPT = [5]
SERVICE = "/orca.v1.GenerateService/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path, chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_generated"),
    [(63, 1, 1), (60, 4, 4), (60, 5, 4), (60, None, 4), (50, 1000, 14), (50, 14, 14)],
)
def test_max_tokens_is_a_cap_within_the_model_length(
    folder: Path, num_prompt: int, max_tokens: int | None, num_generated: int
) -> None:
    async def case() -> None:
        params = SamplingParams(max_tokens=max_tokens)
        async with serving(ScriptedEngine(), folder) as (_, client):
            answer = await client.generate(PROMPT * num_prompt, params)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.usage.prompt_tokens == num_prompt
        assert answer.usage.completion_tokens == len(answer.token_ids) == num_generated

    run(case())


def refused(field: str, **changes: object) -> pytest.ParameterSet:
    """A request that differs from a good one by `changes`, and the field its refusal names."""
    prompt = {"token_ids": pb.TokenIds(ids=[5])}
    for kind in ("text", "token_ids", "chat"):
        if kind in changes:
            prompt = {}
    sampling = changes.pop("sampling", {})
    fields = prompt | changes | {"sampling": pb.SamplingParams(**sampling)}  # type: ignore[arg-type]
    request = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    return pytest.param(field, request, id=f"{field}-{str(request)[:60].strip()!r}")


def one_message(role: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content="A")])


BAD_REQUESTS = [
    refused("prompt: 64 tokens .* at most 64", token_ids=pb.TokenIds(ids=[5] * 64)),
    refused("prompt: 65 tokens .* at most 64", token_ids=pb.TokenIds(ids=[5] * 65)),
    refused("prompt: 192 tokens .* at most 64", text="A" * 191),
    refused("token_ids: -1 ", token_ids=pb.TokenIds(ids=[-1])),
    refused("token_ids: 315 ", token_ids=pb.TokenIds(ids=[5, 315])),
    refused("token_ids: is empty", token_ids=pb.TokenIds()),
    refused("text: is empty", text=""),
    refused("text: is empty", text=" \n\t"),
    refused("prompt: set exactly one .* text and token_ids", text="A", token_ids=pb.TokenIds()),
    refused("chat: has no messages", chat=pb.Chat()),
    refused("chat: .*role ''", chat=one_message("")),
    refused("chat: .*role 'robot'", chat=one_message("robot")),
    refused("request_id: has 300", request_id="x" * 300),
    refused("max_tokens", sampling={"max_tokens": 0}),
    refused("max_tokens", sampling={"max_tokens": -1}),
    refused("temperature", sampling={"temperature": -0.1}),
    refused("temperature", sampling={"temperature": -3.0}),
    refused("temperature", sampling={"temperature": float("nan")}),
    refused("temperature", sampling={"temperature": float("inf")}),
    refused("top_p", sampling={"top_p": 0.0}),
    refused("top_p", sampling={"top_p": 1.01}),
    refused("top_p", sampling={"top_p": 7.0}),
    refused("top_p", sampling={"top_p": float("nan")}),
    refused("top_k", sampling={"top_k": -2}),
    refused("min_p", sampling={"min_p": -0.5}),
    refused("min_p", sampling={"min_p": 1.5}),
]


async def status_of(
    address: str, data: bytes, method: str = "Generate"
) -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await channel.unary_unary(SERVICE + method)(data)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(("field", "request_"), BAD_REQUESTS)
def test_a_bad_request_names_its_field_and_harms_nobody(
    folder: Path, field: str, request_: pb.GenerateRequest
) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with serving(engine, folder) as (server, client):
            code, message = await status_of(server.address, request_.SerializeToString())
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(AssertionError, match=f"^{field}"):
                raise AssertionError(message)
            assert engine.submitted == []
            await client.generate(PROMPT, SamplingParams(max_tokens=2))

    run(case())


def test_the_fields_at_their_limits_are_served(folder: Path) -> None:
    async def case() -> None:
        good = [
            SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=1),
            SamplingParams(max_tokens=1, top_k=320, min_p=1.0, seed=0),
            SamplingParams(max_tokens=1, seed=2**63 - 1),
            SamplingParams(max_tokens=1, seed=2**64 - 1),
        ]
        engine = ScriptedEngine()
        async with serving(engine, folder) as (_, client):
            for params in good:
                await client.generate(PROMPT, params)
        seeds = [request.sampling.seed for request in engine.submitted]
        assert seeds[1:] == [0, 2**63 - 1, 2**64 - 1]

    run(case())


def test_no_prompt_at_all_is_refused(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (server, _):
            code, message = await status_of(server.address, b"")
            assert (code, message) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "prompt: set exactly one of text, token_ids and chat, not none",
            )

    run(case())


def test_bytes_that_are_no_request_are_refused_without_a_traceback(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (server, client):
            code, message = await status_of(server.address, b"\x12\x02\xff\xfe")  # text: not UTF-8
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert message.startswith("request: ")
            await client.generate(PROMPT)

    run(case())
    assert caplog.records == []


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_bytes_that_are_no_message_leave_no_traceback_in_other_services_either(
    folder: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (server, client):
            async with grpc.aio.insecure_channel(server.address) as channel:
                call = channel.stream_stream(method)(iter([b"\x12\x02\xff"]))
                with pytest.raises(grpc.aio.AioRpcError):
                    assert await call.read() is grpc.aio.EOF
            assert await client.health()

    with caplog.at_level("DEBUG", logger="orca_dist"):
        run(case())
    (message,) = [r.getMessage() for r in caplog.records if "DecodeError" in r.getMessage()]
    assert method in message
    assert not any(record.exc_info for record in caplog.records)


def test_a_caller_that_left_before_its_status_is_no_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What gRPC then logs can't be had at will: its record is made here."""

    async def case() -> None:
        async with serving(ScriptedEngine(), folder):
            log = logging.getLogger("grpc._cython.cygrpc")
            log.error("Failed sending", exc_info=grpc.aio.InternalError("batch"))
            log.error("Broken", exc_info=RuntimeError("of ours"))

    run(case())
    assert [record.getMessage() for record in caplog.records] == ["Broken"]


LATER_FIELD = b"\x78\x05"  # number 15, a 5
UNKNOWN_FIELDS = {
    "GenerateRequest": ("Generate", LATER_FIELD),
    "SamplingParams": ("GenerateStream", b"\x2a\x02" + LATER_FIELD),
    "ChatMessage": ("Tokenize", b"\x12\x04\x0a\x02" + LATER_FIELD),
    "AbortRequest": ("Abort", LATER_FIELD),
    "ServerInfoRequest": ("ServerInfo", LATER_FIELD),
    "ModelInfoRequest": ("ModelInfo", LATER_FIELD),
}


@pytest.mark.parametrize("message", UNKNOWN_FIELDS)
def test_a_field_that_nobody_knows_is_refused_not_passed_over(folder: Path, message: str) -> None:
    method, data = UNKNOWN_FIELDS[message]

    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (server, _):
            code, text = await status_of(server.address, data, method)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(f"request: field 15 of orca.v1.{message} is not known to orca-dist")

    run(case())


def test_messages_beyond_16_mib_are_refused_by_size(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (_, client):
            with pytest.raises(InvalidRequest, match="larger than max"):
                await client.generate("A" * (16 * 2**20))
            await client.generate(PROMPT)

    run(case())


# ---- messages of millions of parts -------------------------------------


def field(number: int, inner: bytes) -> bytes:
    """A length-delimited field as it travels."""
    size, length = len(inner), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + inner


MANY = 2**20
HUGE = {
    "unknown fields": (b"\x78\x01" * MANY, "a field of orca.v1.GenerateRequest is not known"),
    "unknown fields inside": (
        field(5, b"\x78\x01" * MANY),
        "a field of orca.v1.GenerateRequest is not known",
    ),
    "chat messages": (field(4, b"\x0a\x00" * MANY), f"chat: has {MANY} messages; at most 10000"),
    "stop texts": (field(5, b"\x42\x00" * MANY), f"stop: {MANY} texts; at most 16"),
    "token ids": (field(3, field(1, b"\x05" * MANY)), f"prompt: {MANY} tokens leave no room"),
}


@pytest.mark.parametrize("what", HUGE)
def test_a_message_of_very_many_parts_is_refused_without_a_look_at_each(
    folder: Path, what: str
) -> None:
    data, problem = HUGE[what]

    async def case() -> None:
        engine = ScriptedEngine()
        async with (
            serving(engine, folder) as (server, client),
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(f"{SERVICE}Generate")(data)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert problem in str(raised.value.details())
            await client.generate(PROMPT, SamplingParams(max_tokens=3))

    run(case())


@pytest.mark.parametrize("what", ["unknown fields", "unknown fields inside"])
def test_unknown_fields_are_not_walked_through(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one they would take seconds, in which the whole server stands still."""

    def walk(message: object) -> object:
        raise AssertionError("a large message was searched")

    monkeypatch.setattr(convert, "UnknownFieldSet", walk)
    with pytest.raises(InvalidRequest, match="is not known"):
        convert.parse(pb.GenerateRequest, HUGE[what][0])
    with pytest.raises(AssertionError):
        convert.parse(pb.GenerateRequest, b"\x78\x01")
