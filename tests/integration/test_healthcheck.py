"""The health check of containers, against whole servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orca_dist.client import healthcheck
from orca_dist.config import ServerConfig
from tests.fixtures.certificates import Certificates
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.front import run, server_of
from tests.fixtures.scripted_engine import ScriptedEngine


async def checked(*arguments: str) -> int:
    return await asyncio.to_thread(healthcheck.main, arguments)


def test_a_server_that_serves(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with server_of(engine, byte_tokenizer(tmp_path), ServerConfig(port=0)) as server:
            assert await checked("--address", server.address) == 0

    run(case())


def test_one_that_does_not_is_alive(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with server_of(engine, byte_tokenizer(tmp_path), ServerConfig(port=0)) as server:
            engine.lose("stage 1 is gone")
            await server.wait_lost()
            while await checked("--address", server.address) == 0:
                pass  # until the health service has heard of it
            assert "is not serving" in capfd.readouterr().err
            assert await checked("--live", "--address", server.address) == 0

    run(case())


def test_over_tls_by_the_name_in_the_certificate(tmp_path: Path) -> None:
    """As in Kubernetes, where a probe calls 127.0.0.1 and the certificate names the service."""
    pems = Certificates(tmp_path)

    async def case() -> None:
        config = pems.server(names=("orca-server",))
        async with server_of(ScriptedEngine(), byte_tokenizer(tmp_path), config) as server:
            asked = ["--address", server.address, "--tls-ca", str(pems.ca)]
            assert await checked(*asked, "--tls-server-name", "orca-server") == 0
            assert await checked(*asked) == 1
            assert await checked("--live", "--address", server.address) == 1

    run(case())


def test_nobody_there_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", healthcheck.__name__, "--live", "--address", address],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert address in line
