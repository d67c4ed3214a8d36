"""Two ends of a probe in one process, over real sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from orca_dist.doctor.probe import Endpoint, ProbeListener, dial

TOKEN = b"0123456789abcdef" * 2
ADDRESS = "127.0.0.3"


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    listener = ProbeListener(ADDRESS, TOKEN)
    yield listener
    listener.close()


def endpoint(port: int, host: str = ADDRESS) -> Endpoint:
    return Endpoint(node="there", host=host, port=port)


def test_a_way_is_measured(listener: ProbeListener) -> None:
    link = dial("here", endpoint(listener.port), TOKEN)
    assert (link.source, link.target, link.problem) == ("here", "there", "")
    assert 0 < link.latency_s < 1
    assert link.bytes_s > 0
    assert abs(link.offset_s) <= link.error_s + 1e-3  # one clock


def test_it_listens_on_its_own_address_alone(listener: ProbeListener) -> None:
    link = dial("here", endpoint(listener.port, host="127.0.0.1"), TOKEN)
    assert link.problem == f"127.0.0.1:{listener.port}: Connection refused"


def test_a_wrong_token_is_told_nothing(listener: ProbeListener) -> None:
    with socket.create_connection((ADDRESS, listener.port), timeout=5) as connection:
        connection.sendall(b"x" * len(TOKEN) + b"p")
        with contextlib.suppress(ConnectionResetError):  # it closed with our ping unread
            assert connection.recv(1) == b""
    assert dial("here", endpoint(listener.port), b"x" * len(TOKEN)).problem
    assert not dial("here", endpoint(listener.port), TOKEN).problem


def test_nonsense_ends_its_own_connection_only(listener: ProbeListener) -> None:
    with socket.create_connection((ADDRESS, listener.port), timeout=5) as connection:
        connection.sendall(TOKEN + b"?")
        assert connection.recv(1) == b""
    assert not dial("here", endpoint(listener.port), TOKEN).problem


def test_who_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are taken by the kernel, and nobody serves them."""
    monkeypatch.setattr("orca_dist.doctor.probe.TIMEOUT_S", 0.2)
    with socket.create_server((ADDRESS, 0)) as silent:
        port = silent.getsockname()[1]
        assert dial("here", endpoint(port), TOKEN).problem == f"{ADDRESS}:{port}: timed out"


def test_a_closed_listener_answers_nobody() -> None:
    listener = ProbeListener(ADDRESS, TOKEN)
    listener.close()
    assert dial("here", endpoint(listener.port), TOKEN).problem
