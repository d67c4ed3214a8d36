"""One node looks at itself."""

from __future__ import annotations

import resource
import socket

from orca_kernels.cpu.build import BuildError, load_library

from orca_dist.doctor.facts import NodeFacts, Question
from orca_dist.doctor.gpus import gpu_facts
from orca_dist.doctor.memory import memory_facts, shm_facts
from orca_dist.doctor.models import model_facts
from orca_dist.doctor.network import interface_facts, port_facts, ray_heads
from orca_dist.doctor.open_ray import ask_without_token
from orca_dist.versions import installed_versions


def gather(node: str, address: str, question: Question) -> NodeFacts:
    """The facts of this node, which others reach at `address`.

    Takes about a second; minutes where the CPU kernels are to be compiled first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        node=node,
        hostname=socket.gethostname(),
        versions=installed_versions(),
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


def _compiler_problem() -> str:
    try:
        load_library()
    except (BuildError, OSError) as error:
        return str(error)
    return ""
