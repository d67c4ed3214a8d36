"""API keys: who is let in, who is who, and that no key is ever shown."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from orca_dist.client import AsyncClient, Client, Unauthenticated
from orca_dist.config import ServerConfig
from orca_dist.errors import ConfigError, DuplicateRequest, RequestCancelled, UnknownRequest
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.proto.v1 import generate_pb2_grpc
from orca_dist.server.keys import ApiKeys, bearer
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.front import run, server_of
from tests.fixtures.scripted_engine import ScriptedEngine

PROMPT = [5]
SHORT = SamplingParams(max_tokens=3)
ALICE, BOB = "alice-5f2c", "bob-91ab"
KEYS = f"# who may call\n\nalice:{ALICE}\nbob:{BOB}\n"
PLAIN = ServerConfig(port=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path)


def keys_file(folder: Path, text: str = KEYS, *, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def keyed(folder: Path) -> ServerConfig:
    return ServerConfig(port=0, api_keys_file=keys_file(folder))


# ---- who is let in -----------------------------------------------------


@pytest.mark.parametrize("key", ["", "alice", "alice-5f2", "alice-5f2cc", f"alice:{ALICE}"])
def test_a_call_without_a_known_key_is_turned_away(folder: Path, key: str) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with (
            server_of(engine, folder, keyed(folder)) as server,
            AsyncClient(server.address, api_key=key) as client,
        ):
            calls = (
                client.generate(PROMPT, SHORT),
                anext(client.stream(PROMPT, SHORT)),
                client.info(),
                client.model_info(),
                client.tokenize("A"),
                client.abort("r1"),
            )
            for call in calls:
                with pytest.raises(Unauthenticated) as raised:
                    await call
                assert str(raised.value) == "this server needs a valid API key"
        assert engine.submitted == []

    run(case())


def test_health_needs_no_key_but_reflection_does(folder: Path) -> None:
    async def case() -> None:
        async with (
            server_of(ScriptedEngine(), folder, keyed(folder)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in stub.ServerReflectionInfo(iter([ask])):
                    pass
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            (answer,) = [
                answer
                async for answer in stub.ServerReflectionInfo(
                    iter([ask]), metadata=(("authorization", f"bearer {BOB}"),)
                )
            ]
            assert len(answer.list_services_response.service) == 3

    run(case())


def test_keys_of_the_variable_count_beside_those_of_the_file(folder: Path) -> None:
    async def case() -> None:
        async with server_of(
            ScriptedEngine(), folder, keyed(folder), api_keys="carol:c-1 dave:d-1"
        ) as server:
            for key in (ALICE, BOB, "c-1", "d-1"):
                async with AsyncClient(server.address, api_key=key) as client:
                    assert (await client.generate(PROMPT, SHORT)).usage.completion_tokens == 3

    run(case())


def test_a_blocking_client_sends_its_key_too(folder: Path) -> None:
    async def case() -> None:
        async with server_of(ScriptedEngine(), folder, keyed(folder)) as server:

            def calls() -> None:
                with Client(server.address, api_key=ALICE) as client:
                    chunks = list(client.stream(PROMPT, SHORT))
                    assert sum(len(chunk.token_ids) for chunk in chunks) == 3
                    assert client.info().epoch == 1

            await asyncio.to_thread(calls)

    run(case())


def test_a_changed_file_is_in_force_at_once_and_a_broken_one_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        async with server_of(ScriptedEngine(), folder, keyed(folder)) as server:

            async def may_call(key: str) -> bool:
                async with AsyncClient(server.address, api_key=key) as client:
                    try:
                        await client.model_info()
                    except Unauthenticated:
                        return False
                    return True

            assert await may_call(ALICE)
            keys_file(folder, "alice:a-second-key\n")
            assert [await may_call(key) for key in (ALICE, BOB, "a-second-key")] == [0, 0, 1]
            keys_file(folder, "nonsense-that-is-secret")
            assert await may_call("a-second-key")
            keys_file(folder).unlink()
            assert await may_call("a-second-key")

    run(case())
    assert "line 1: needs name:key" in caplog.text
    assert "can't be read" in caplog.text
    assert "nonsense" not in caplog.text


# ---- who is who --------------------------------------------------------


def test_a_request_id_belongs_to_its_caller(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with (
            server_of(engine, folder, keyed(folder)) as server,
            AsyncClient(server.address, api_key=ALICE) as alice,
            AsyncClient(server.address, api_key=ALICE) as alice_elsewhere,
            AsyncClient(server.address, api_key=BOB) as bob,
        ):
            hers = alice.stream(PROMPT, request_id="x")
            await anext(hers)
            with pytest.raises(UnknownRequest):
                await bob.abort("x")
            his = bob.stream(PROMPT, request_id="x")  # no duplicate: it is another's
            await anext(his)
            with pytest.raises(DuplicateRequest):
                await alice_elsewhere.generate(PROMPT, request_id="x")
            await alice_elsewhere.abort("x")
            with pytest.raises(RequestCancelled):
                async for _ in hers:
                    pass
            await anext(his)
            assert engine.num_live == 1
            await bob.abort("x")

    run(case())


# ---- what is read ------------------------------------------------------


def test_a_caller_may_have_several_keys() -> None:
    keys = ApiKeys.read(None, "alice:old alice:new bob:b:with:colons")
    assert [keys.name_of(key) for key in ("old", "new", "b:with:colons", "b")] == [
        "alice",
        "alice",
        "bob",
        None,
    ]


@pytest.mark.parametrize(
    "line",
    ["hunter2", ":hunter2", "alice:", "alice: hunter2", "a/b:hunter2", "alice:hunt er2", "a:größe"],
)
def test_a_line_that_is_no_key_is_named_but_not_shown(folder: Path, line: str) -> None:
    path = keys_file(folder, f"bob:b-1\n{line}\n")
    with pytest.raises(ConfigError, match=r"api_keys_file = .*/keys, line 2: needs name:key") as e:
        ApiKeys.read(path, "")
    assert "hunt" not in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# nobody\n", "holds no key"),
        ("alice:same\nbob:same\n", "line 2: this key is another caller's already"),
    ],
)
def test_a_file_that_lets_nobody_in_or_confuses_callers_is_refused(
    folder: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ApiKeys.read(keys_file(folder, text), "")


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_keys_file = .*/none: can't be read: No such file"):
        ApiKeys.read(folder / "none", "")


@pytest.mark.parametrize(("mode", "num_warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_file_that_everybody_can_read_is_warned_about(
    folder: Path, mode: int, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ApiKeys.read(keys_file(folder, mode=mode), "")
    assert sum("chmod 600" in record.message for record in caplog.records) == num_warnings


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ([("authorization", "Bearer k")], "k"),
        ([("x", "y"), ("authorization", "bEARER  k ")], "k"),
        ([("authorization", "Basic k")], ""),
        ([("authorization", "k")], ""),
        ([("authorization", b"Bearer k")], ""),
        ([], ""),
    ],
)
def test_the_key_of_a_call(metadata: list[tuple[str, str | bytes]], key: str) -> None:
    assert bearer(metadata) == key


# ---- keys stay secret --------------------------------------------------


def test_nothing_that_holds_a_key_shows_it(folder: Path) -> None:
    path = keys_file(folder)
    keys = ApiKeys.read(path, "carol:c-secret")
    shown = (
        f"{keys!r} {keys.names} {vars(Client(api_key=ALICE))['address']} {Client(api_key=ALICE)!r}"
    )
    for secret in (ALICE, BOB, "c-secret"):
        assert secret not in shown


@pytest.mark.parametrize("key", ["two words", "größe", "line\nbreak", "k" * 513])
def test_a_client_refuses_a_key_that_no_header_holds_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key: is none") as raised:
        Client(api_key=key)
    assert key not in str(raised.value)


def test_a_key_leaves_this_machine_over_tls_alone_unless_allowed() -> None:
    for address in ("10.0.0.7:50051", "server:50051", "[fe80::1]:50051"):
        with pytest.raises(ConfigError, match=r"would cross the network in the clear.*--tls on"):
            Client(address, api_key="k")
        Client(address, api_key="k", insecure_key=True).close()
        Client(address).close()
    for address in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
        Client(address, api_key="k").close()


def test_a_key_in_a_message_is_a_key_no_more(folder: Path) -> None:
    """A raw caller's other headers and odd schemes end as any wrong key does."""

    async def case() -> None:
        async with (
            server_of(ScriptedEngine(), folder, keyed(folder)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            stub = generate_pb2_grpc.GenerateServiceStub(channel)
            for value in ("", "Bearer", "Bearer ", ALICE, f"Token {ALICE}", "Bearer " + "x" * 6000):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.ServerInfo(
                        pb.ServerInfoRequest(), metadata=(("authorization", value),)
                    )
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(case())


def test_the_environment_of_this_test_holds_no_key() -> None:
    """Else the tests above would pass with it."""
    assert not [name for name in os.environ if name.startswith("ORCA_API")]
