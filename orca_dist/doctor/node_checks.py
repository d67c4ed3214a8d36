"""Verdicts on one node's facts. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from orca_dist.doctor.facts import Gpu, NodeFacts, Question, Source, SourceKind
from orca_dist.doctor.verdicts import Check, Finding, failed, passed, warned
from orca_dist.doctor.words import GIB, MIB, listed, size

SHM_BYTES = 512 * MIB  # NCCL and Ray's object store share it; Docker's own default is 64 MiB
MIN_FILES = 4096
GPU_USED_SHARE = 0.1


def check_node(facts: NodeFacts, question: Question) -> Iterator[Finding]:
    """What can be said of a node by itself."""
    if question.source is not None:
        yield _model(facts, question.source, is_own=bool(question.host))
    yield _gpus(facts, wants_cuda=question.wants_cuda)
    if not question.wants_cuda:
        yield _compiler(facts)
    yield _shm(facts)
    yield _files(facts)
    if question.host:
        yield _port(facts)
    yield _interface(facts)


def _model(facts: NodeFacts, source: Source, *, is_own: bool) -> Finding:
    model, node = facts.model, facts.node
    assert model is not None, "asked for"
    if not model.problem:
        here = "is here" if model.fetched else "not here yet, but the Hub answers: fetched at start"
        return passed(Check.MODEL, f"{model.name}: {here}", node=node)
    seen = model.problem if model.name in model.problem else f"{model.name}: {model.problem}"
    if source.kind is SourceKind.HUB:
        return failed(Check.MODEL, seen, "see that this node reaches the Hub", node=node)
    if source.is_default and is_own:
        return warned(
            Check.MODEL, seen, "serve fetches it at start; or: orca-dist model fetch", node=node
        )
    if source.is_default:
        return failed(Check.MODEL, seen, "orca-dist model fetch, on this node", node=node)
    remedy = "give a folder that is there" if is_own else "have the same files at the same path"
    return failed(Check.MODEL, seen, f"{remedy}: stages read them from there", node=node)


def _gpus(facts: NodeFacts, *, wants_cuda: bool) -> Finding:
    node, gpus = facts.node, facts.gpus
    if gpus.problem:
        remedy = "see that nvidia-smi works here (in a container: docker run --gpus all)"
        judged = failed if wants_cuda else warned
        return judged(Check.GPUS, gpus.problem, remedy, node=node)
    if not gpus.gpus:
        return passed(Check.GPUS, "none", node=node)
    seen = f"{_counted(gpus.gpus)}, driver {gpus.driver}"
    if gpus.torch_problem:
        remedy = "install a build of torch for this driver's CUDA, or a newer driver"
        return failed(Check.GPUS, f"{seen}; {gpus.torch_problem}", remedy, node=node)
    busy = [gpu for gpu in gpus.gpus if gpu.used_bytes > GPU_USED_SHARE * gpu.memory_bytes]
    if busy:
        told = listed([f"GPU {gpu.index} has {size(gpu.used_bytes)} in use" for gpu in busy])
        remedy = "end what holds it (nvidia-smi shows it), unless it is this server"
        return warned(Check.GPUS, f"{seen}; {told}", remedy, node=node)
    return passed(Check.GPUS, seen, node=node)


def _counted(gpus: tuple[Gpu, ...]) -> str:
    kinds = {(gpu.name, gpu.memory_bytes): 0 for gpu in gpus}
    for gpu in gpus:
        kinds[gpu.name, gpu.memory_bytes] += 1
    return ", ".join(f"{n} x {name} of {size(memory)}" for (name, memory), n in kinds.items())


def _compiler(facts: NodeFacts) -> Finding:
    if not facts.compiler_problem:
        return passed(Check.COMPILER, "the CPU kernels are compiled", node=facts.node)
    seen = f"no CPU kernels: {facts.compiler_problem}"
    remedy = "install a C++20 compiler (Debian: g++); torch computes meanwhile, slower"
    return warned(Check.COMPILER, seen, remedy, node=facts.node)


def _shm(facts: NodeFacts) -> Finding:
    space, node = facts.shm, facts.node
    remedy = (
        f"docker run --shm-size={-(-SHM_BYTES // GIB)}g (or --ipc=host); in Kubernetes an emptyDir "
        "of medium Memory at /dev/shm"
    )
    if space.problem:
        return warned(Check.SHM, space.problem, remedy, node=node)
    seen = f"{size(space.free_bytes)} of {size(space.total_bytes)} free in /dev/shm"
    if space.free_bytes < SHM_BYTES:
        return warned(Check.SHM, f"{seen}, {size(SHM_BYTES)} wanted", remedy, node=node)
    return passed(Check.SHM, seen, node=node)


def _files(facts: NodeFacts) -> Finding:
    seen = f"{facts.files_soft} open files (at most {facts.files_hard})"
    if facts.files_soft >= MIN_FILES:
        return passed(Check.FILES, seen, node=facts.node)
    most = min(facts.files_hard, 65536)
    remedy = f"ulimit -n {max(most, MIN_FILES)} where Ray or serve is started"
    return warned(Check.FILES, f"{seen}, {MIN_FILES} wanted", remedy, node=facts.node)


def _port(facts: NodeFacts) -> Finding:
    port = facts.port
    assert port is not None, "asked for"
    place = f"port {port.port} on {port.host}"
    if not port.problem:
        free = f"{place} is free" if port.port else f"any free port on {port.host}"
        return passed(Check.PORT, free, node=facts.node)
    held = f": {port.holder} listens there" if port.holder else f": {port.problem}"
    remedy = "end that, unless it is your server, or choose another --port (0: any) or --host"
    return failed(Check.PORT, f"{place}{held}", remedy, node=facts.node)


def _interface(facts: NodeFacts) -> Finding:
    interface, node = facts.interface, facts.node
    others = f"this node has {listed(interface.others)}"
    if not interface.name:
        remedy = "start Ray here with --node-ip-address and an address of this node"
        return failed(
            Check.INTERFACE, f"{node} belongs to no interface; {others}", remedy, node=node
        )
    for variable, value in interface.named.items():
        if not _names_one(variable, value, interface.others):
            seen = f"{variable}={value} names no interface here; {others}"
            remedy = f"unset {variable}, or name one: {interface.name} has this node's address"
            return failed(Check.INTERFACE, seen, remedy, node=node)
    return passed(Check.INTERFACE, f"{node.partition('#')[0]} on {interface.name}", node=node)


def _names_one(variable: str, value: str, present: tuple[str, ...]) -> bool:
    """Gloo takes one name as it is. NCCL takes beginnings of names, whole ones after =, and
    those to leave out after ^.
    """
    if variable.startswith("GLOO"):
        return value in present
    if value.startswith("^"):
        left_out = tuple(value[1:].split(","))
        return any(not name.startswith(left_out) for name in present)
    if value.startswith("="):
        return not set(value[1:].split(",")).isdisjoint(present)
    return any(name.startswith(tuple(value.split(","))) for name in present)
