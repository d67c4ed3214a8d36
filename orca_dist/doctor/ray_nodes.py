"""Every node of a Ray cluster, examined by an actor that reserves nothing there.

With stage/actor and engine/ray_pipeline the only place that knows Ray: it is asked which
nodes there are, and to run the examiner on each. Nothing is left behind.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orca_dist.doctor.examiner import Examiner
from orca_dist.doctor.facts import Link, NodeFacts, Question, RayPort, Room, Unheard
from orca_dist.doctor.nodes import Call
from orca_dist.doctor.open_ray import ask_without_token
from orca_dist.doctor.probe import Endpoint
from orca_dist.engine.ray_address import check_joinable
from orca_dist.errors import StartupError

GATHER_TIMEOUT_S = 180.0  # the kernels may have to be compiled
PROBE_TIMEOUT_S = 45.0


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class ExaminerActor:
    """A thin shell around an Examiner."""

    def __init__(self, node: str, address: str) -> None:
        self._examiner = Examiner(node, address)

    def gather(self, question: Question) -> NodeFacts:
        return self._examiner.gather(question)

    def listen(self, token: bytes) -> Endpoint:
        return self._examiner.listen(token)

    def dial(self, endpoint: Endpoint, token: bytes) -> Link:
        return self._examiner.dial(endpoint, token)


class RayNodes:
    """The nodes that were alive when it was made; made by `connected`."""

    def __init__(self, rooms: Sequence[Room], actors: Sequence[Any], head: RayPort) -> None:
        self.names = [room.node for room in rooms]
        self.rooms = rooms
        self.head = head
        self._actors = actors

    def gather(self, questions: Sequence[Question]) -> list[NodeFacts | Unheard]:
        calls = [
            actor.gather.remote(question)
            for actor, question in zip(self._actors, questions, strict=True)
        ]
        return _answers(calls, self.names, GATHER_TIMEOUT_S)

    def listen(self, token: bytes) -> list[Endpoint | Unheard]:
        calls = [actor.listen.remote(token) for actor in self._actors]
        return _answers(calls, self.names, PROBE_TIMEOUT_S)

    def dial(self, calls: Sequence[Call], token: bytes) -> list[Link]:
        names = [self.names[call.source] for call in calls]
        dialling = [self._actors[call.source].dial.remote(call.endpoint, token) for call in calls]
        return [
            Link(source=name, target=call.endpoint.node, problem=answer.problem)
            if isinstance(answer, Unheard)
            else answer
            for name, call, answer in zip(
                names, calls, _answers(dialling, names, PROBE_TIMEOUT_S), strict=True
            )
        ]


@contextlib.contextmanager
def connected(address: str) -> Iterator[RayNodes]:
    """The cluster at `address` (host:port, or auto); raises StartupError where there is none."""
    _connect(address)
    actors: list[Any] = []
    try:
        nodes = _alive_nodes()
        names = _names(nodes)
        for node, name in zip(nodes, names, strict=True):
            actors.append(_actor(node, name))
        head = ask_without_token(ray.get_runtime_context().gcs_address)
        rooms = [_room(node, name) for node, name in zip(nodes, names, strict=True)]
        yield RayNodes(rooms, actors, head)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()


def _connect(address: str) -> None:
    check_joinable(address)
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        words = " ".join(str(error).split())
        raise StartupError(f"no Ray can be joined at ray_address = {address}: {words}") from None


def _alive_nodes() -> list[dict[str, Any]]:
    """This process's own first, the others by address."""
    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))


def _names(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Addresses; with the beginning of the node's id where two share one."""
    addresses = [str(node["NodeManagerAddress"]) for node in nodes]
    return [
        f"{address}#{node['NodeID'][:6]}" if addresses.count(address) > 1 else address
        for address, node in zip(addresses, nodes, strict=True)
    ]


def _room(node: dict[str, Any], name: str) -> Room:
    resources = node["Resources"]  # without those that it has none of
    return Room(
        node=name,
        num_cpus=resources.get("CPU", 0.0),
        num_gpus=resources.get("GPU", 0.0),
    )


def _actor(node: dict[str, Any], name: str) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    return ExaminerActor.options(  # type: ignore[attr-defined]
        scheduling_strategy=place
    ).remote(name, node["NodeManagerAddress"])


def _answers(calls: Sequence[Any], names: Sequence[str], timeout_s: float) -> list[Any]:
    """In their order; an Unheard of that name for each that failed, or did not come in time."""
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    return [
        _answer(name, call)
        if call in ready
        else Unheard(node=name, problem=f"no answer within {timeout_s:g} s")
        for name, call in zip(names, calls, strict=True)
    ]


def _answer(node: str, call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Unheard(node=node, problem=lines[-1] if lines else type(error).__name__)
