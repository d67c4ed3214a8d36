"""Addresses, ports and listening Rays of this node."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator

import psutil

from orca_dist.doctor.facts import InterfaceFacts, PortFacts

RAY_HEAD = "gcs_server"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_facts(address: str) -> InterfaceFacts:
    """Which interface owns `address`, and which ones variables ask for."""
    owners = {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    if is_loopback(address):  # lo owns all of 127.0.0.0/8, though it lists one
        owners[address] = next((name for at, name in owners.items() if is_loopback(at)), "")
    named = {name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}
    others = tuple(sorted(set(owners.values())))
    return InterfaceFacts(name=owners.get(address, ""), others=others, named=named)


def port_facts(host: str, port: int) -> PortFacts:
    """Whether somebody could listen on `host`:`port` now; 0 is any port, and always free."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in places:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        holder = _holder(port) if error.errno == errno.EADDRINUSE else ""
        return PortFacts(host=host, port=port, problem=error.strerror or str(error), holder=holder)
    return PortFacts(host=host, port=port)


def ray_heads() -> list[str]:
    """Addresses (host:port) beyond loopback on which a Ray head of this node listens.

    Every user sees the heads that are their own; root sees all.
    """
    places = {(ip, port) for ip, port, pid in _listening() if _name(pid) == RAY_HEAD}
    return [join(ip, port) for ip, port in sorted(places) if not is_loopback(ip)]


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an IP address; one that is none is not."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def join(host: str, port: int) -> str:
    """host:port, as one writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listening() -> Iterator[tuple[str, int, int]]:
    """Address, port and process of every TCP port here whose process this user may see."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr:
            ip, port = connection.laddr
            yield ip, port, connection.pid


def _holder(port: int) -> str:
    """Who listens on `port`: names and ids of processes; empty where this user may not see."""
    pids = {pid for _, at, pid in _listening() if at == port}
    return ", ".join(f"{_name(pid)} (pid {pid})" for pid in sorted(pids))


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # gone by now
        return ""
