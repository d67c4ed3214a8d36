"""The network interface that carries a stage's activations: this node's, derived here.

Names of interfaces differ between hosts, so they are never taken from another one. What
the node's own environment says is checked before a library reads it, which would tell of
a wrong name late and in its own words. Imports no torch.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import psutil

from orca_dist.errors import StartupError

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
EXCEPT, EXACTLY = "^", "="  # how NCCL's lists of names may begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One address of an interface, and the network that it is reached from."""

    ip: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network


Interfaces = Mapping[str, Sequence[Address]]


def interfaces_here() -> Interfaces:
    """Those of this host that have an address."""
    found = {
        name: [_address(each.address, each.netmask) for each in addresses if _is_ip(each.family)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def interface_of(host: str, interfaces: Interfaces) -> str | None:
    """The one that has this address, else one whose network holds it (127.0.0.2 is lo's)."""
    for name, addresses in interfaces.items():
        if any(address.ip == host for address in addresses):
            return name
    ip = ipaddress.ip_address(host)
    for name, addresses in interfaces.items():
        if any(ip in address.network for address in addresses):
            return name
    return None


def gloo_host(host: str, environment: Mapping[str, str], interfaces: Interfaces) -> str:
    """The address that links bind to: `host`, unless GLOO_SOCKET_IFNAME names an interface.

    Stages that talk over loopback stay there. Raises StartupError where the variable names
    no interface of this node; gloo takes one plain name.
    """
    name, ip = environment.get(GLOO_VARIABLE, ""), ipaddress.ip_address(host)
    addresses = [each for each in interfaces.get(name, ()) if each.network.version == ip.version]
    if name and not addresses:
        raise _no_interface(GLOO_VARIABLE, name, host, interfaces, "gloo takes the name of one")
    return addresses[0].ip if addresses and not ip.is_loopback else host


def set_nccl_interface(
    host: str, environment: MutableMapping[str, str], interfaces: Interfaces
) -> None:
    """NCCL_SOCKET_IFNAME becomes the interface that has `host`, unless the node has set it.

    Raises StartupError where what it is set to fits none.
    """
    given = environment.get(NCCL_VARIABLE, "")
    if given and not _fits_any(given, interfaces):
        rule = "NCCL takes beginnings of names"
        raise _no_interface(NCCL_VARIABLE, given, host, interfaces, rule)
    if not given and (name := interface_of(host, interfaces)):
        environment[NCCL_VARIABLE] = EXACTLY + name


def _fits_any(given: str, interfaces: Interfaces) -> bool:
    if given.startswith(EXCEPT):
        return any(not _named(given[1:], name) for name in interfaces)
    if given.startswith(EXACTLY):
        return any(name in given[1:].split(",") for name in interfaces)
    return any(_named(given, name) for name in interfaces)


def _named(beginnings: str, name: str) -> bool:
    return name.startswith(tuple(filter(None, beginnings.split(","))))


def _no_interface(
    variable: str, value: str, host: str, interfaces: Interfaces, rule: str
) -> StartupError:
    return StartupError(
        f"{variable} = {value} fits no interface of node {host}, which has "
        f"{', '.join(interfaces) or 'none'}: {rule}; correct it in that node's environment, or "
        f"unset it, and the one that has {host} is taken"
    )


def _is_ip(family: int) -> bool:
    return family in (socket.AF_INET, socket.AF_INET6)


def _address(ip: str, netmask: str | None) -> Address:
    ip = ip.partition("%")[0]
    if ":" in ip:  # its mask comes as an address, which ipaddress does not take
        bits = sum(bin(int(part or "0", 16)).count("1") for part in (netmask or ip).split(":"))
        return Address(ip=ip, network=ipaddress.IPv6Network(f"{ip}/{bits}", strict=False))
    network = ipaddress.IPv4Network(f"{ip}/{netmask or 32}", strict=False)
    return Address(ip=ip, network=network)
