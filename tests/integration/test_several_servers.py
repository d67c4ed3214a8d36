"""Several servers of one machine, started at the same moment: none takes what is another's.

Every port is the kernel's choice and is bound when it is chosen, so that no two servers can
meet on one; a Ray of a server's own has a folder of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from orca_dist import Client, SamplingParams
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.serving import END_S, Serving, all_serving, gone, serve_command

ROUNDS = 9  # and a tenth with Rays
PROMPT = [5, 9, 17]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
TERMINATED = 143
TORCH_DEFAULT_PORT = 29500  # which everything that uses torch.distributed would meet on

ONE = ("--launcher", "local", "--stages", "1")
TWO = ("--launcher", "local", "--stages", "2")
RAY = ("--launcher", "ray", "--stages", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(autouse=True)
def temp_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short one of the test's own; nothing may be left in it."""
    with tempfile.TemporaryDirectory(prefix="s") as own:
        monkeypatch.setenv("TMPDIR", own)
        yield Path(own)
        assert list(Path(own).iterdir()) == []


def test_three_at_once(folder: Path) -> None:
    _round(folder, [TWO, ONE, TWO])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_at_once_round_after_round(folder: Path) -> None:
    for _ in range(ROUNDS):
        _round(folder, [TWO, ONE, ONE, TWO, ONE])


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_five_at_once_two_of_them_on_rays_of_their_own(folder: Path) -> None:
    _round(folder, [RAY, ONE, RAY, ONE, TWO])


def _round(folder: Path, kinds: Sequence[Sequence[str]]) -> None:
    """All start, answer alike, listen on ports of their own, and end with nothing left."""
    small = ("--kv-tokens", "512", "--cpus-per-stage", "1")
    with all_serving([serve_command(folder, *small, *each) for each in kinds]) as servers:
        answers = [_answer(server) for server in servers]
        assert answers == [answers[0]] * len(servers)
        _check_ports(servers)
        processes = [process for server in servers for process in server.children()]
        for server in servers:
            server.process.terminate()
        for server in servers:
            code, err = server.end()
            assert (code, "Traceback" in err) == (TERMINATED, False), err
    assert gone(processes, END_S)


def _answer(server: Serving) -> tuple[int, ...]:
    with Client(server.address) as client:
        return client.generate(PROMPT, PARAMS).token_ids


def _check_ports(servers: Sequence[Serving]) -> None:
    ports = [_ports(server) for server in servers]
    assert len(frozenset().union(*ports)) == sum(len(each) for each in ports)
    assert TORCH_DEFAULT_PORT not in frozenset().union(*ports)


def _ports(server: Serving) -> frozenset[int]:
    """On which the server, its stages and its Ray listen."""
    return frozenset(
        connection.laddr.port
        for process in (psutil.Process(server.process.pid), *server.children())
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    )
