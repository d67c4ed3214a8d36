"""TLS and mutual TLS on the server's port, and which ports may be open to other machines."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from orca_dist.cli.knobs import knobs
from orca_dist.cli.settings import AccessConfig
from orca_dist.client import AsyncClient, Client, ServerUnavailable, Tls, Unauthenticated
from orca_dist.client.errors import HINTS
from orca_dist.config import ServerConfig
from orca_dist.errors import ConfigError, DuplicateRequest, UnknownRequest
from orca_dist.params import SamplingParams
from orca_dist.server import listen
from tests.fixtures.certificates import Certificates
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.front import run, server_of
from tests.fixtures.scripted_engine import ScriptedEngine

PROMPT = [5]
SHORT = SamplingParams(max_tokens=3)
TIMEOUT_S = 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path)


@pytest.fixture
def pems(tmp_path: Path) -> Certificates:
    made = tmp_path / "pem"
    made.mkdir()
    return Certificates(made)


def test_both_clients_speak_tls(folder: Path, pems: Certificates) -> None:
    async def case() -> None:
        async with server_of(ScriptedEngine(), folder, pems.server()) as server:
            async with AsyncClient(server.address, tls=Tls(ca=pems.ca)) as client:
                assert (await client.generate(PROMPT, SHORT)).usage.completion_tokens == 3
                assert await client.health()

            def calls() -> None:
                with Client(server.address, tls=Tls(ca=str(pems.ca))) as client:
                    chunks = list(client.stream(PROMPT, SHORT))
                assert sum(len(chunk.token_ids) for chunk in chunks) == 3

            await asyncio.to_thread(calls)

    run(case())


@pytest.mark.parametrize("tls", [None, Tls()], ids=["plain text", "well-known CAs"])
def test_a_client_without_the_servers_ca_gets_nowhere(
    folder: Path, pems: Certificates, tls: Tls | None
) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with (
            server_of(engine, folder, pems.server()) as server,
            AsyncClient(server.address, tls=tls) as client,
        ):
            with pytest.raises(ServerUnavailable, match="no orca-dist server answers"):
                await client.generate(PROMPT, SHORT, timeout_s=TIMEOUT_S)
        assert engine.submitted == []

    run(case())


def test_a_certificate_for_another_name_needs_that_name(folder: Path, pems: Certificates) -> None:
    async def case() -> None:
        config = pems.server(names=("orca.example",))
        async with server_of(ScriptedEngine(), folder, config) as server:
            async with AsyncClient(server.address, tls=Tls(ca=pems.ca)) as client:
                with pytest.raises(ServerUnavailable):
                    await client.model_info(timeout_s=TIMEOUT_S)
            tls = Tls(ca=pems.ca, server_name="orca.example")
            async with AsyncClient(server.address, tls=tls) as client:
                await client.model_info()

    run(case())


async def complaint(address: str, tls: Tls | None) -> str:
    """What a call to `address` fails with."""
    async with AsyncClient(address, tls=tls) as client:
        with pytest.raises(ServerUnavailable) as raised:
            await client.info(timeout_s=TIMEOUT_S)
    return str(raised.value)


def test_a_failed_handshake_says_which_flag_may_help(folder: Path, pems: Certificates) -> None:
    async def case() -> None:
        ours, stranger = Tls(ca=pems.ca), Certificates(pems.folder, name="stranger")
        async with server_of(ScriptedEngine(), folder, pems.server()) as server:
            assert "does it want TLS (--tls-ca," in await complaint(server.address, None)
            for tls in (Tls(), Tls(ca=stranger.ca)):
                assert "its CA by --tls-ca" in await complaint(server.address, tls)
        async with server_of(ScriptedEngine(), folder, pems.server(client_ca=pems.ca)) as server:
            for tls in (ours, stranger.client("eve", ca=pems.ca)):
                said = await complaint(server.address, tls)
                assert "(--tls-client-cert, --tls-client-key)?" in said
        async with server_of(ScriptedEngine(), folder, pems.server(names=("a.b",))) as server:
            assert (await complaint(server.address, ours)).endswith("by --tls-server-name")
        async with server_of(ScriptedEngine(), folder, ServerConfig(port=0)) as server:
            assert "does it talk plain text?" in await complaint(server.address, ours)

    run(case())


def test_hints_name_flags_that_clients_have() -> None:
    named = {flag for _, hint in HINTS for flag in re.findall(r"--[a-z]+[a-z-]*[a-z]", hint)}
    assert named == {knob.flag for knob in knobs(AccessConfig) if knob.name.startswith("tls")}


def test_mutual_tls_lets_in_those_with_a_certificate_of_its_ca(
    folder: Path, pems: Certificates
) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with server_of(engine, folder, pems.server(client_ca=pems.ca)) as server:
            stranger = Certificates(pems.folder, name="stranger")
            for tls in (Tls(ca=pems.ca), stranger.client("eve", ca=pems.ca)):
                async with AsyncClient(server.address, tls=tls) as client:
                    with pytest.raises(ServerUnavailable):
                        await client.generate(PROMPT, SHORT, timeout_s=TIMEOUT_S)
            assert engine.submitted == []
            async with AsyncClient(server.address, tls=pems.client("alice")) as client:
                await client.generate(PROMPT, SHORT)

    run(case())


def test_a_client_certificate_says_who_calls(folder: Path, pems: Certificates) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with (
            server_of(engine, folder, pems.server(client_ca=pems.ca)) as server,
            AsyncClient(server.address, tls=pems.client("alice")) as alice,
            AsyncClient(server.address, tls=pems.client("bob")) as bob,
        ):
            hers, his = (c.stream(PROMPT, request_id="x") for c in (alice, bob))
            await anext(hers)
            await anext(his)
            with pytest.raises(DuplicateRequest):
                await alice.generate(PROMPT, request_id="x")
            await bob.abort("x")
            with pytest.raises(UnknownRequest):
                await bob.abort("x")
            await anext(hers)

    run(case())


def test_keys_go_with_tls(folder: Path, pems: Certificates) -> None:
    async def case() -> None:
        async with server_of(
            ScriptedEngine(), folder, pems.server(), api_keys="alice:a-1"
        ) as server:
            async with AsyncClient(server.address, api_key="a-1", tls=Tls(ca=pems.ca)) as client:
                await client.generate(PROMPT, SHORT)
            async with AsyncClient(server.address, tls=Tls(ca=pems.ca)) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate(PROMPT, SHORT)

    run(case())


# ---- files that change -------------------------------------------------


def test_a_renewed_certificate_is_shown_to_new_connections(
    folder: Path, pems: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        config = pems.server()
        async with (
            server_of(ScriptedEngine(max_model_len=100_000), folder, config) as server,
            AsyncClient(server.address, tls=Tls(ca=pems.ca)) as old,
        ):
            answer = old.stream(PROMPT)
            await anext(answer)
            shown = [await shown_by(server.address)]
            assert config.tls_cert is not None
            assert config.tls_key is not None
            before = config.tls_key.read_bytes()
            pems.server()
            renewed = config.tls_key.read_bytes()
            config.tls_key.write_bytes(before)  # half of a renewal: they don't fit
            shown.append(await shown_by(server.address))
            config.tls_key.write_bytes(renewed)
            shown.append(await shown_by(server.address))
            assert shown[0] == shown[1] != shown[2]
            await anext(answer)  # a connection keeps what it was made with

    run(case())
    assert "is not the key of tls_cert" in caplog.text


async def shown_by(address: str) -> bytes:
    """The certificate that a new connection sees."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert isinstance(found, bytes)
        return found
    finally:
        writer.close()


# ---- files that don't do -----------------------------------------------


def empty(config: ServerConfig, folder: Path) -> ServerConfig:
    (folder / "empty").write_text("")
    return replace(config, tls_cert=folder / "empty")


def mismatched(config: ServerConfig, folder: Path) -> ServerConfig:
    other = trustme.CA().issue_cert("localhost").private_key_pem.bytes()
    (folder / "other.key").write_bytes(other)
    return replace(config, tls_key=folder / "other.key")


def encrypted(config: ServerConfig, folder: Path) -> ServerConfig:
    from cryptography.hazmat.primitives import serialization as pem

    assert config.tls_key is not None
    key = pem.load_pem_private_key(config.tls_key.read_bytes(), None)
    sealed = key.private_bytes(
        pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"password")
    )
    (folder / "sealed.key").write_bytes(sealed)
    return replace(config, tls_key=folder / "sealed.key")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c, f: replace(c, tls_cert=f / "no"), r"tls_cert = .*/no: can't be read: No such"),
        (lambda c, f: replace(c, tls_key=f), r"tls_key = .*: can't be read: Is a directory"),
        (lambda c, f: replace(c, tls_client_ca=f / "no"), r"tls_client_ca = .*/no: can't be read"),
        (lambda c, f: replace(c, tls_client_ca=c.tls_key), r"tls_client_ca = .*: needs PEM cert"),
        (lambda c, f: replace(c, tls_key=None), "tls_key: has to be given, too"),
        (lambda c, f: replace(c, tls_cert=None), "tls_cert: has to be given, too"),
        (
            lambda c, f: ServerConfig(port=0, tls_client_ca=f / "ca"),
            r"tls_client_ca = .*/ca: needs the server's own",
        ),
        (empty, r"tls_cert = .*/empty and tls_key = .*: need a PEM certificate"),
        (mismatched, r"tls_key = .*/other\.key: is not the key of tls_cert = "),
        (encrypted, r"tls_key = .*/sealed\.key: is encrypted"),
    ],
)
def test_a_file_at_fault_is_named(
    folder: Path,
    pems: Certificates,
    change: Callable[[ServerConfig, Path], ServerConfig],
    problem: str,
) -> None:
    async def case() -> None:
        with pytest.raises(ConfigError, match=problem) as raised:
            await listen(change(pems.server(), folder))
        assert "\n" not in str(raised.value)

    run(case())


def test_a_clients_files_at_fault_are_named(pems: Certificates, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_ca = .*/none: can't be read"):
        Client(tls=Tls(ca=folder / "none"))
    with pytest.raises(ConfigError, match="tls_client_cert and tls_client_key belong together"):
        Client(tls=Tls(ca=pems.ca, cert=pems.ca))


# ---- ports open to others ----------------------------------------------


def listening(config: ServerConfig, api_keys: str = "") -> None:
    async def case() -> None:
        listener = await listen(config, api_keys)
        await listener.server.stop(None)

    run(case())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_port_open_to_others_needs_keys_and_tls_or_client_certificates(
    pems: Certificates, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, tls = ServerConfig(host=host, port=0), replace(pems.server(), host=host)
    for config in (plain, tls):
        with pytest.raises(ConfigError, match=rf"host = {host}: .*--allow-insecure on") as raised:
            listening(config)
        assert "no authentication" in str(raised.value)
    with pytest.raises(ConfigError, match=r"keys would cross .* in the clear.*--allow-insecure on"):
        listening(plain, "alice:a-1")
    with caplog.at_level(logging.WARNING):
        listening(tls, "alice:a-1")
        listening(replace(tls, tls_client_ca=pems.ca))
        assert caplog.text == ""
        listening(ServerConfig(host=host, port=0, allow_insecure="on"))  # type: ignore[arg-type]
        assert "there is no authentication" in caplog.text
        listening(replace(plain, allow_insecure="on"), "alice:a-1")  # type: ignore[arg-type]
        assert "keys would cross the network in the clear" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_this_machines_own_addresses_need_nothing(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        listening(ServerConfig(host=host, port=0))
        listening(ServerConfig(host=host, port=0), "alice:a-1")
    assert caplog.text == ""
