"""The whole examination: questions to all nodes, calls between all pairs, then verdicts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from orca_dist.doctor.cluster_checks import (
    check_clocks,
    check_links,
    check_memory,
    check_places,
    check_ray,
    check_versions,
)
from orca_dist.doctor.facts import Demand, Link, Need, NodeFacts, Question, Unheard
from orca_dist.doctor.node_checks import check_node
from orca_dist.doctor.nodes import Call, Nodes
from orca_dist.doctor.probe import Endpoint
from orca_dist.doctor.verdicts import Check, Finding, Verdict, failed, worst

OnProgress = Callable[[int, int], None]  # steps done, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was seen, and what is made of it; findings in the order of the checks."""

    nodes: tuple[NodeFacts | Unheard, ...]
    links: tuple[Link, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)


def examine(
    nodes: Nodes,
    question: Question,
    demand: Demand,
    need: Need | None,
    on_progress: OnProgress = lambda done, total: None,
) -> Report:
    """Asks `question` of the first node, and of the others without the port.

    Memory counts where there is a place for a stage.
    """
    elsewhere = Question(source=question.source, host="", port=0, wants_cuda=question.wants_cuda)
    questions = [question, *(elsewhere for _ in nodes.names[1:])]
    steps = len(nodes.names) + 1
    answers = nodes.gather(questions)
    on_progress(1, steps)
    links, deaf = [], []
    for done, (found, silent) in enumerate(_probe(nodes), 2):
        links += found
        deaf += silent
        on_progress(done, steps)
    heard = [answer for answer in answers if isinstance(answer, NodeFacts)]
    findings = [
        *_unheard([*(each for each in answers if isinstance(each, Unheard)), *deaf]),
        *(
            finding
            for answer, asked in zip(answers, questions, strict=True)
            if isinstance(answer, NodeFacts)
            for finding in check_node(answer, asked)
        ),
        *_of_cluster(nodes, heard, links, demand, need),
    ]
    return Report(nodes=tuple(answers), links=tuple(links), findings=_in_order(findings))


def with_finding(report: Report, finding: Finding) -> Report:
    """The same, with one more."""
    return replace(report, findings=_in_order([*report.findings, finding]))


def _in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    order = list(Check)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.check)))


def without_cluster(alone: Report, problem: str) -> Report:
    """The report of this node, where others were asked for."""
    remedy = "start it (ray start --head prints its address), or leave --ray-address out"
    return with_finding(alone, failed(Check.RAY, problem, remedy))


def _probe(nodes: Nodes) -> Iterator[tuple[list[Link], list[Unheard]]]:
    """Round by round: in each a node calls one other and is called by one."""
    token = secrets.token_hex(16).encode()
    places = nodes.listen(token)
    count = len(places)
    for shift in range(count):
        calls = [
            Call(source=index, endpoint=place)
            for index in range(count)
            if isinstance(places[index], Endpoint)
            and isinstance(place := places[(index + shift) % count], Endpoint)
        ]
        silent = [place for place in places if isinstance(place, Unheard)] if not shift else []
        yield nodes.dial(calls, token) if calls else [], silent


def _unheard(silent: Sequence[Unheard]) -> Iterator[Finding]:
    """Once for each node, with the first reason."""
    reasons: dict[str, str] = {}
    for each in silent:
        reasons.setdefault(each.node, each.problem)
    for node, problem in reasons.items():
        yield failed(
            Check.NODE,
            f"can't be examined: {problem}",
            "see that this node is up, and has the same orca_dist installed",
            node=node,
        )


def _of_cluster(
    nodes: Nodes,
    heard: Sequence[NodeFacts],
    links: Sequence[Link],
    demand: Demand,
    need: Need | None,
) -> Iterator[Finding]:
    if heard:
        yield from check_versions(heard)
    if nodes.rooms:
        yield from check_places(nodes.rooms, demand)
    without = {room.node for room in nodes.rooms if not demand.places(room)}
    hosts = [facts for facts in heard if facts.node not in without]
    if hosts and need is not None:
        yield from check_memory(hosts, need)
    yield from check_links(links, need)
    yield from check_clocks(links)
    yield from check_ray(nodes.head, heard)
