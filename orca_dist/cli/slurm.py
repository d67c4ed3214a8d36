"""What a Slurm job is, and what is its own on the nodes that it shares with others.

Nodes and the head come from Slurm's variables; ports and the folder follow from the job's id,
so that two jobs on one node do not meet. Starts nothing; knows nothing of Ray.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from orca_dist.errors import ConfigError, StartupError

FIRST_PORT = 20_000  # up to 31 999: below the ports that Linux hands out by itself
PORTS_PER_JOB = 10
NUM_PORT_SETS = 1200
MAX_RAY_FOLDER_LEN = 40  # socket paths below it must stay within 107 bytes
RAY_FOLDER = "r"  # in the job's: Ray opens its own to all users, and nobody gets through ours
NODE_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 4(x2): four on each of two nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """`head` is the node that the job's script runs on; `cpus` of each node are the job's."""

    job_id: int
    nodes: tuple[str, ...]
    head: str
    cpus: int

    @property
    def workers(self) -> tuple[str, ...]:
        """All nodes but the head."""
        return tuple(node for node in self.nodes if node != self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRay:
    """Where the job's Ray is: `port` for its nodes, `client_port` for Ray's own clients."""

    address: str
    port: int
    client_port: int
    folder: Path


def read_job(environment: Mapping[str, str]) -> SlurmJob:
    """The job that this process is in; raises ConfigError where it is in none."""
    try:
        job_id, nodelist = int(environment["SLURM_JOB_ID"]), environment["SLURM_JOB_NODELIST"]
    except (KeyError, ValueError):
        raise ConfigError(
            "SLURM_JOB_ID and SLURM_JOB_NODELIST: not set, so this is no Slurm job; start it by "
            "sbatch slurm.sbatch (orca-dist cluster init slurm DIR writes that file)"
        ) from None
    nodes = _hostnames(nodelist)
    return SlurmJob(
        job_id=job_id,
        nodes=nodes,
        head=environment.get("SLURMD_NODENAME") or nodes[0],
        cpus=_cpus(environment),
    )


def _hostnames(nodelist: str) -> tuple[str, ...]:
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise StartupError("scontrol: not found; Slurm's commands have to be in PATH") from None
    except subprocess.CalledProcessError as error:
        raise StartupError(f"scontrol can't read {nodelist}: {error.stderr.strip()}") from None
    return tuple(done.stdout.split())


def _cpus(environment: Mapping[str, str]) -> int:
    """CPUs that the job has on each node; on the poorest, where they differ."""
    if per_task := environment.get("SLURM_CPUS_PER_TASK"):
        return int(per_task)
    counts = NODE_COUNT.findall(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return min((int(count) for count, _ in counts), default=1)


# ---- addresses ---------------------------------------------------------


def own_addresses() -> list[str]:
    """This machine's IPv4 addresses, those of interfaces that are up, loopback last."""
    stats = psutil.net_if_stats()
    found = [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for address in addresses
        if address.family is socket.AF_INET
    ]
    return sorted(found, key=_is_loopback)


def node_address(node: str, network: str, own: Sequence[str]) -> str:
    """One of `own` for other nodes to call: in `network` if given, else what `node` stands for.

    A name that stands for a loopback address (127.0.1.1 in some /etc/hosts) counts for nothing.
    """
    if network:
        return address_in(network, own)
    named = [address for address in _resolved(node) if address in own and not _is_loopback(address)]
    return next(iter([*named, *own]), "127.0.0.1")


def address_in(network: str, own: Sequence[str]) -> str:
    """The first of `own` in `network`; raises ConfigError naming them where none is."""
    try:
        wanted = ipaddress.IPv4Network(network, strict=False)
    except ValueError:
        raise ConfigError(f"network = {network}: needs an IPv4 one such as 10.1.0.0/16") from None
    for address in own:
        if ipaddress.IPv4Address(address) in wanted:
            return address
    raise ConfigError(
        f"network = {network}: no address of {socket.gethostname()} is in it; it has "
        f"{', '.join(own)}"
    )


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


# ---- ports and the folder ----------------------------------------------


def ports(job_id: int) -> range:
    """The job's first choice; the next job's do not overlap."""
    first = FIRST_PORT + job_id % NUM_PORT_SETS * PORTS_PER_JOB
    return range(first, first + PORTS_PER_JOB)


def free_ports(job_id: int, address: str) -> range:
    """The job's ports, or the nearest later set of which nobody has one."""
    for later in range(NUM_PORT_SETS):
        mine = ports(job_id + later)
        if all(_is_free(address, port) for port in mine):
            return mine
    raise StartupError(
        f"ports {FIRST_PORT} to {ports(NUM_PORT_SETS - 1).stop - 1} of {address}: no set of "
        f"{PORTS_PER_JOB} is free; end what uses them"
    )


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def job_folder(job_id: int, temp_dir: str) -> Path:
    """The job's own: in `temp_dir`, or in /tmp where that is too long for Ray's sockets."""
    folder = Path(temp_dir) / f"orca-{job_id}"
    fits = len(str(folder / RAY_FOLDER)) <= MAX_RAY_FOLDER_LEN
    return folder if fits else Path("/tmp") / folder.name


def make_folder(folder: Path, *, anew: bool) -> None:
    """For our eyes only; `anew`: without what an earlier run of the same job may have left.

    Raises StartupError where it is somebody else's.
    """
    if anew and _is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"{folder}: can't be made: {error.strerror}; set TMPDIR") from None
    if not _is_ours(folder):
        raise StartupError(f"{folder}: is not ours; set TMPDIR to a folder of your own")


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == psutil.Process().uids().real
