"""Which stage goes where on a cluster, what is told when there is no room, what travels (pure).

Knows the nodes' tables as values, and nothing of who places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

PASSED = ("NCCL_*", "GLOO_*", "HF_*")  # whatever else is asked for
# Each node has its own, or Ray makes them: the driver's would be wrong elsewhere.
OF_ONE_HOST = ("*_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "RAY_*")
KINDS = ("CPU", "GPU")  # of what a stage takes; a node's other resources say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """What a living node has, and what of it nobody has reserved."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def told(self, kinds: Iterable[str]) -> str:
        """For one line: free and all of it, by kind."""
        parts = [f"{self.free.get(k, 0):g} of {self.total.get(k, 0):g} {k}" for k in kinds]
        return f"{self.address} has {' and '.join(parts)} free"


def bundle_told(bundle: Mapping[str, float]) -> str:
    """What one stage reserves: 1 CPU and 1 GPU."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())


def nodes_told(nodes: Sequence[NodeRoom], bundle: Mapping[str, float]) -> str:
    """Every node, and of it what a stage would take."""
    kinds = [kind for kind in KINDS if kind in bundle]
    told = sorted(node.told(kinds) for node in nodes)
    return "; ".join(told) or "the cluster has no node"


def bundles_of_stages(nodes: Sequence[str]) -> tuple[int, ...]:
    """The bundle of each stage, for bundles that lie on `nodes`: neighbours share a node.

    Where the bundles of each node follow one another already, stage i has bundle i.
    """
    first: dict[str, int] = {}
    for bundle, node in enumerate(nodes):
        first.setdefault(node, bundle)
    return tuple(sorted(range(len(nodes)), key=lambda bundle: (first[nodes[bundle]], bundle)))


def passed_environment(environment: Mapping[str, str], also: Iterable[str]) -> dict[str, str]:
    """The variables that stages on other nodes get: PASSED and `also`, but none of one host."""
    wanted = (*PASSED, *also)
    return {
        name: value
        for name, value in environment.items()
        if _matches(name, wanted) and not _matches(name, OF_ONE_HOST)
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
