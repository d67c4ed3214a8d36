"""What a client says when a call fails: whichever way, one clear error of ours."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from orca_dist.client import AsyncClient, Client, DeadlineExceeded, ServerUnavailable
from orca_dist.client.errors import BY_CODE, translate
from orca_dist.errors import InvalidRequest, OrcaError, QueueFull, RequestCancelled
from orca_dist.params import SamplingParams
from orca_dist.server.details import rich_status
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.foreign_port import answering
from tests.fixtures.front import run, serving
from tests.fixtures.scripted_engine import ScriptedEngine

ADDRESS = "host:1"


class Failure(grpc.RpcError):
    """A failed call as grpc reports it."""

    def __init__(self, status: grpc.StatusCode, details: str, rich: bytes = b"") -> None:
        self._status, self._details = status, details
        self._trailers = [("grpc-status-details-bin", rich)] if rich else []

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return self._trailers


# ---- statuses ----------------------------------------------------------


def failure_of(error: OrcaError) -> Failure:
    """As the server sends `error`."""
    rich = rich_status(error)
    return Failure(grpc.StatusCode[error.status], rich.message, rich.SerializeToString())


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_an_error_of_ours_comes_back_as_itself(kind: type[OrcaError]) -> None:
    error = translate(failure_of(kind("it happened")), ADDRESS)
    assert (type(error), str(error)) == (kind, "it happened")


def test_every_error_of_a_call_has_its_code_known() -> None:
    assert QueueFull.code in BY_CODE
    assert len(BY_CODE) == len({kind.code for kind in BY_CODE.values()})


def test_an_invalid_request_keeps_its_field() -> None:
    failure = failure_of(InvalidRequest("top_p", "7.0 is not in (0, 1]"))
    error = translate(failure, ADDRESS)
    assert isinstance(error, InvalidRequest)
    assert (error.field, str(error)) == ("top_p", "top_p: 7.0 is not in (0, 1]")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ServerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, RequestCancelled),
        (grpc.StatusCode.UNIMPLEMENTED, ServerUnavailable),
        (grpc.StatusCode.DATA_LOSS, OrcaError),
    ],
)
def test_a_foreign_status_names_the_address(status: grpc.StatusCode, kind: type[OrcaError]) -> None:
    error = translate(Failure(status, "whatever"), ADDRESS)
    assert type(error) is kind
    assert ADDRESS in str(error)


def test_a_code_newer_than_the_client_goes_by_status() -> None:
    class OfTomorrow(OrcaError):
        code = "of_tomorrow"
        status = "UNAVAILABLE"

    assert type(translate(failure_of(OfTomorrow("closing")), ADDRESS)) is ServerUnavailable


def test_a_full_queue_says_when_to_try_again() -> None:
    error = translate(failure_of(QueueFull("4 wait", retry_after_s=2.5)), ADDRESS)
    assert isinstance(error, QueueFull)
    assert (str(error), error.retry_after_s) == ("4 wait", 2.5)


def test_long_messages_are_cut_to_fit_into_headers() -> None:
    failure = failure_of(InvalidRequest("chat", "🙂" * 5000))
    error = translate(failure, ADDRESS)
    assert isinstance(error, InvalidRequest)
    assert error.field == "chat"
    assert set(str(error).removeprefix("chat: ")) == {"🙂"}
    (_, rich), *_ = failure.trailing_metadata()
    assert len(rich) < 2500


def damaged(message: str, *, value: bytes = b"", domain: str = "orca-dist") -> Failure:
    """A rich status that is none of ours, or no longer."""
    rich = rich_status(QueueFull("full"))
    info = error_details_pb2.ErrorInfo(reason="queue_full", domain=domain)
    rich.details[0].Pack(info)
    rich.details[0].value = value or rich.details[0].value
    return Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, message, rich.SerializeToString())


@pytest.mark.parametrize(
    "failure",
    [
        damaged("full", domain="example.com"),
        damaged("full", value=b"\xff\xff"),
        damaged("another message"),
        Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", b"\xff\xff"),
    ],
)
def test_details_that_are_not_ours_are_left_alone(failure: Failure) -> None:
    assert isinstance(translate(failure, ADDRESS), InvalidRequest)  # as without any


# ---- what a message can't hold -----------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "request_id", "field"),
    [
        ("a\udcff", SamplingParams(), "", "text"),
        ([2**70], SamplingParams(), "", "token_ids"),
        ([1, "x"], SamplingParams(), "", "token_ids"),
        ([1.5], SamplingParams(), "", "token_ids"),
        (7, SamplingParams(), "", "token_ids"),
        ([{"role": "user"}], SamplingParams(), "", "chat"),
        ([{"role": "user", "content": [{"type": "image"}]}], SamplingParams(), "", "chat"),
        ([{"role": "user", "content": "a", "name": "b"}], SamplingParams(), "", "chat"),
        ("a", SamplingParams(seed=2**64), "", "seed"),
        ("a", SamplingParams(seed=-1), "", "seed"),
        ("a", SamplingParams(max_tokens=2**70), "", "max_tokens"),
        ("a", SamplingParams(top_k=1.5), "", "top_k"),  # type: ignore[arg-type]
        ("a", SamplingParams(temperature="hot"), "", "temperature"),  # type: ignore[arg-type]
        ("a", SamplingParams(return_logits=True), "", "return_logits"),
        ("a", SamplingParams(), "\udcff", "request_id"),
    ],
)
def test_what_a_message_cannot_hold_is_refused_by_field(
    prompt: object, params: SamplingParams, request_id: str, field: str
) -> None:
    with Client(ADDRESS) as client, pytest.raises(InvalidRequest) as raised:
        client.stream(prompt, params, request_id=request_id)  # type: ignore[arg-type]
    assert raised.value.field == field


# ---- servers that are none of ours -------------------------------------


def outcomes(address: str) -> list[str]:
    """The messages of every kind of call to `address`, of both clients."""

    async def of_async_client() -> list[str]:
        messages = []
        async with AsyncClient(address) as client:
            for call in (client.generate("a"), client.info(), client.health()):
                with pytest.raises(ServerUnavailable) as raised:
                    await call
                messages.append(str(raised.value))
            with pytest.raises(ServerUnavailable) as raised:
                await anext(client.stream("a"))
        return [*messages, str(raised.value)]

    with Client(address) as client:
        calls = [
            lambda: client.generate("a"),
            lambda: next(client.stream("a")),
            client.info,
            client.health,
        ]
        messages = []
        for call in calls:
            with pytest.raises(ServerUnavailable) as raised:
                call()
            messages.append(str(raised.value))
    return [*messages, *asyncio.run(of_async_client())]


def test_nobody_at_the_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for message in outcomes(address):
        assert message.startswith(f"no orca-dist server answers at {address}: ")
        assert "--tls" not in message


def test_a_web_server_at_the_port() -> None:
    with answering() as address:
        for message in outcomes(address):
            assert address in message
            assert "\n" not in message


def test_another_grpc_server_at_the_port() -> None:
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        for message in outcomes(address):
            assert message.startswith(f"{address} is not an orca-dist server: UNIMPLEMENTED")
        server.stop(None).wait()


def test_a_port_that_never_answers_is_left_at_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Client(address) as client, pytest.raises(DeadlineExceeded, match=address):
            client.generate("a", timeout_s=0.3)


def test_closing_a_client_ends_its_streams(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with serving(engine, byte_tokenizer(tmp_path)) as (server, _):
            client = AsyncClient(server.address)
            chunks = client.stream([5])
            await anext(chunks)
            await client.close()
            assert await asyncio.to_thread(engine.wait_for, lambda: len(engine.cancelled) == 1)

    run(case())
