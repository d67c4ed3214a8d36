"""What is known of a node and of the ways between nodes: values that checks look at.

Gathered on each node (gather.py, probe.py), judged elsewhere, and the same whether the
node was asked directly or through Ray. No behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class SourceKind(StrEnum):
    """What the model's name means."""

    FOLDER = "folder"
    HUB = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model as a node has to find it: `name` is a folder's absolute path or an id of the Hub.

    revision: of the Hub. has_weights: weights have to be there, too. is_default: the
    folder is the default model's, which the server's own node fetches by itself.
    """

    kind: SourceKind
    name: str
    revision: str = ""
    has_weights: bool = True
    is_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one node is asked. host, port: to try to listen on; host empty: not on this node.

    wants_cuda: stages are to compute on GPUs, so that torch is asked for them.
    """

    source: Source | None
    host: str
    port: int
    wants_cuda: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its driver sees it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """problem: why the driver could not be asked; empty where there is no sign of a GPU.

    torch_problem: why torch can't use them; empty where it can, or was not asked.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    problem: str = ""
    torch_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFacts:
    """Of a file system, in bytes; problem: why it could not be asked."""

    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """limit_bytes: of the machine, or of the container or job around this process."""

    limit_bytes: int
    available_bytes: int
    is_limited: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """name: of the interface that owns the node's address; empty where none does.

    named: variables that name interfaces for gloo or NCCL, and their values.
    """

    name: str
    others: tuple[str, ...]
    named: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """problem: why nobody can listen there now; holder: who does, where that can be seen."""

    host: str
    port: int
    problem: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """problem: why the model can't be used from this node. fetched: its weights are here."""

    name: str
    fetched: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPort:
    """A Ray head that listens. open: answers without a token; None where that can't be told,
    and `problem` says why."""

    address: str
    open: bool | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node. `node` is its name in the report: its address, or more where two share one.

    files_soft, files_hard: the bounds on open files. compiler_problem: why the CPU kernels
    can't be built; empty where they are.
    """

    node: str
    hostname: str
    versions: Mapping[str, str]
    gpus: GpuFacts
    memory: MemoryFacts
    shm: SpaceFacts
    files_soft: int
    files_hard: int
    interface: InterfaceFacts
    compiler_problem: str
    ray_ports: tuple[RayPort, ...]
    port: PortFacts | None = None
    model: ModelFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unheard:
    """A node that did not answer, and why."""

    node: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What `source` saw when it connected to `target`; zeros where a problem kept it from it.

    latency_s: of a round trip, the median. offset_s: the target's clock minus the source's,
    known to within error_s.
    """

    source: str
    target: str
    latency_s: float = 0.0
    bytes_s: float = 0.0
    offset_s: float = 0.0
    error_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What Ray may give away of a node, in all; what is in use counts too."""

    node: str
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What Ray has to give: `num_cpus` for each stage, and a GPU if `on_gpu`."""

    num_stages: int
    num_cpus: float
    on_gpu: bool

    def places(self, room: Room) -> int:
        """How many stages have their place on a node."""
        by_cpus = int(room.num_cpus / self.num_cpus + 1e-9)  # a third of a CPU goes in thrice
        return min(by_cpus, int(room.num_gpus)) if self.on_gpu else by_cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the model needs, in bytes.

    stage_bytes: of each stage for weights and activations. token_bytes: of one token's keys and
    values at all stages. memory_share: what KV may take of the rest. on_gpu: in a GPU's memory,
    else in the node's. link_bytes: what a full iteration, of `rows` tokens, sends from a stage
    to the next.
    """

    stage_bytes: tuple[int, ...]
    token_bytes: int
    max_model_len: int
    memory_share: float
    on_gpu: bool
    link_bytes: int
    rows: int
