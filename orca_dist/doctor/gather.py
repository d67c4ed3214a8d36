"""One node looks at itself."""

from __future__ import annotations

import platform
import resource
import socket
from importlib import metadata

from orca_kernels.cpu.build import BuildError, load_library

from orca_dist import __version__
from orca_dist.doctor.facts import NodeFacts, Question
from orca_dist.doctor.gpus import gpu_facts
from orca_dist.doctor.memory import memory_facts, shm_facts
from orca_dist.doctor.models import model_facts
from orca_dist.doctor.network import interface_facts, port_facts, ray_heads
from orca_dist.doctor.open_ray import ask_without_token

PACKAGES = ("torch", "ray")


def gather(node: str, address: str, question: Question) -> NodeFacts:
    """The facts of this node, which others reach at `address`.

    Takes about a second; minutes where the CPU kernels are to be compiled first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        node=node,
        hostname=socket.gethostname(),
        versions=versions(),
        gpus=gpu_facts(ask_torch=question.wants_cuda),
        memory=memory_facts(),
        shm=shm_facts(),
        files_soft=soft,
        files_hard=hard,
        interface=interface_facts(address),
        compiler_problem=_compiler_problem(),
        ray_ports=tuple(ask_without_token(head) for head in ray_heads()),
        port=port_facts(question.host, question.port) if question.host else None,
        model=model_facts(question.source) if question.source else None,
    )


def versions() -> dict[str, str]:
    """Of Python and the packages that all nodes should have alike; empty: not installed."""
    found = {"python": platform.python_version(), "orca_dist": __version__}
    return found | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _compiler_problem() -> str:
    try:
        load_library()
    except (BuildError, OSError) as error:
        return str(error)
    return ""
