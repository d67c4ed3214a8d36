"""The interface of a stage's links: the node's own; a wrong name is told beside those it has."""

from __future__ import annotations

import socket
from typing import NamedTuple

import psutil
import pytest

from orca_dist.errors import StartupError
from orca_dist.transport.interfaces import (
    gloo_host,
    interface_of,
    interfaces_here,
    set_nccl_interface,
)

LOOPBACK, FABRIC, OTHER = "127.0.0.1", "10.1.0.5", "10.2.0.5"


class Nic(NamedTuple):
    """What psutil tells of an address."""

    address: str
    netmask: str
    family: int = socket.AF_INET


@pytest.fixture(autouse=True)
def _nics(monkeypatch: pytest.MonkeyPatch) -> None:
    v6 = "ffff:ffff:ffff:ffff::"
    found = {
        "lo": [Nic(LOOPBACK, "255.0.0.0"), Nic("::1", "ffff:" * 7 + "ffff", socket.AF_INET6)],
        "ib0": [Nic(FABRIC, "255.255.0.0"), Nic("fe80::7%ib0", v6, socket.AF_INET6)],
        "eth0": [Nic("fd00::5", v6, socket.AF_INET6), Nic(OTHER, "255.255.0.0")],
        "down0": [Nic("02:42:ac:11:00:02", "", psutil.AF_LINK)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def test_an_interface_without_an_address_is_none() -> None:
    assert list(interfaces_here()) == ["lo", "ib0", "eth0"]


@pytest.mark.parametrize(
    ("host", "name"),
    [
        (FABRIC, "ib0"),
        (OTHER, "eth0"),
        ("127.0.0.9", "lo"),
        ("fe80::7", "ib0"),
        ("fd00::99", "eth0"),
        ("192.168.0.1", None),
    ],
)
def test_the_interface_that_has_the_address(host: str, name: str | None) -> None:
    assert interface_of(host, interfaces_here()) == name


@pytest.mark.parametrize(
    ("given", "host", "bound"),
    [
        ("", FABRIC, FABRIC),
        ("eth0", FABRIC, OTHER),
        ("eth0", "fd00::99", "fd00::5"),
        ("eth0", LOOPBACK, LOOPBACK),  # what talks on this machine alone stays there
    ],
)
def test_gloo_binds_to_the_node_s_address_or_that_of_the_one_it_names(
    given: str, host: str, bound: str
) -> None:
    assert gloo_host(host, {"GLOO_SOCKET_IFNAME": given}, interfaces_here()) == bound


@pytest.mark.parametrize("given", ["^lo", "eth1", "eth0,ib0", "down0"])
@pytest.mark.parametrize("host", [FABRIC, LOOPBACK])
def test_gloo_takes_one_name_that_is_there(given: str, host: str) -> None:
    with pytest.raises(StartupError) as caught:
        gloo_host(host, {"GLOO_SOCKET_IFNAME": given}, interfaces_here())
    assert str(caught.value) == (
        f"GLOO_SOCKET_IFNAME = {given} fits no interface of node {host}, which has lo, ib0, eth0: "
        "gloo takes the name of one; correct it in that node's environment, or unset it, and the "
        f"one that has {host} is taken"
    )


@pytest.mark.parametrize(
    ("given", "host", "then"),
    [
        ("", FABRIC, "=ib0"),
        ("", OTHER, "=eth0"),
        ("", LOOPBACK, "=lo"),
        ("", "192.168.0.1", None),  # behind an address translation: NCCL chooses
        ("eth", FABRIC, "eth"),
        ("^docker,lo", FABRIC, "^docker,lo"),
        ("=eth0,ib7", FABRIC, "=eth0,ib7"),
    ],
)
def test_nccl_gets_the_interface_of_this_node_unless_it_was_told(
    given: str, host: str, then: str | None
) -> None:
    environment = {"NCCL_SOCKET_IFNAME": given} if given else {}
    set_nccl_interface(host, environment, interfaces_here())
    assert environment.get("NCCL_SOCKET_IFNAME") == then


@pytest.mark.parametrize("given", ["wlan", "=eth", "^lo,ib,eth"])
def test_nccl_is_told_nothing_that_fits_no_interface(given: str) -> None:
    with pytest.raises(StartupError, match=r"NCCL_SOCKET_IFNAME = .* which has lo, ib0, eth0: "):
        set_nccl_interface(FABRIC, {"NCCL_SOCKET_IFNAME": given}, interfaces_here())


def test_this_machine_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert interface_of("127.0.0.1", interfaces_here()) == "lo"
