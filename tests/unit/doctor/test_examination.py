"""A whole examination of nodes that are objects of this process, with addresses of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from orca_dist.doctor.examination import Report, examine, without_cluster
from orca_dist.doctor.examiner import Examiner
from orca_dist.doctor.facts import Link, Need, NodeFacts, Question, RayPort, Room, Unheard
from orca_dist.doctor.nodes import Call
from orca_dist.doctor.probe import Endpoint
from orca_dist.doctor.verdicts import Check, Verdict
from tests.fixtures.doctored import DEMAND, NEED, QUESTION

NAMES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
ASKED = replace(QUESTION, source=None, host="127.0.0.1", port=0)


class Neighbours:
    """Three nodes, of which `deaf` ones don't answer."""

    names = NAMES
    head = RayPort(address="127.0.0.2:6379", open=False)
    rooms = tuple(
        Room(node=name, num_cpus=num_cpus, num_gpus=0)
        for name, num_cpus in zip(NAMES, (0, 2, 2), strict=True)
    )

    def __init__(self, deaf: Sequence[str] = ()) -> None:
        self._examiners = [Examiner(name, name) for name in NAMES]
        self._deaf = deaf
        self.questions: list[Question] = []
        self.rounds: list[list[tuple[str, str]]] = []

    def gather(self, questions: Sequence[Question]) -> list[NodeFacts | Unheard]:
        self.questions = list(questions)
        return [
            Unheard(node=name, problem="gone") if name in self._deaf else examiner.gather(question)
            for name, examiner, question in zip(NAMES, self._examiners, questions, strict=True)
        ]

    def listen(self, token: bytes) -> list[Endpoint | Unheard]:
        return [
            Unheard(node=name, problem="gone too") if name in self._deaf else examiner.listen(token)
            for name, examiner in zip(NAMES, self._examiners, strict=True)
        ]

    def dial(self, calls: Sequence[Call], token: bytes) -> list[Link]:
        self.rounds.append([(NAMES[call.source], call.endpoint.node) for call in calls])
        return [self._examiners[call.source].dial(call.endpoint, token) for call in calls]

    def close(self) -> None:
        for examiner in self._examiners:
            examiner.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_dist.doctor.probe.SEND_S", 0.01)


def examined(nodes: Neighbours, need: Need | None = None) -> Report:
    with ExitStack() as stack:
        stack.enter_context(closing(nodes))
        return examine(nodes, ASKED, DEMAND, need)


def test_every_pair_once_and_no_node_twice_in_a_round() -> None:
    nodes = Neighbours()
    report = examined(nodes)
    pairs = [pair for each in nodes.rounds for pair in each]
    assert sorted(pairs) == sorted((a, b) for a in NAMES for b in NAMES)
    for each in nodes.rounds:
        assert len({source for source, _ in each}) == len({target for _, target in each}) == 3
    assert len(report.links) == 9
    assert {finding.node for finding in report.findings if finding.check is Check.FILES} == set(
        NAMES
    )


def test_the_port_is_the_first_nodes() -> None:
    nodes = Neighbours()
    examined(nodes)
    assert [question.host for question in nodes.questions] == ["127.0.0.1", "", ""]


def test_a_node_that_does_not_answer_is_told_once_and_the_others_are_examined() -> None:
    nodes = Neighbours(deaf=["127.0.0.3"])
    report = examined(nodes)
    told = [finding for finding in report.findings if finding.check is Check.NODE]
    assert [(finding.node, finding.verdict) for finding in told] == [("127.0.0.3", Verdict.FAIL)]
    assert "gone" in told[0].seen
    assert report.verdict is Verdict.FAIL
    assert {link.source for link in report.links} == {"127.0.0.2", "127.0.0.4"}
    assert len(report.links) == 4


def test_findings_come_in_the_order_of_the_checks() -> None:
    checks = [finding.check for finding in examined(Neighbours()).findings]
    assert checks == sorted(checks, key=list(Check).index)


def test_memory_counts_where_there_is_a_place() -> None:
    findings = {finding.check: finding for finding in examined(Neighbours(), NEED).findings}
    assert findings[Check.PLACES].verdict is Verdict.PASS
    assert "; 2 nodes of " in findings[Check.MEMORY].seen


def test_a_cluster_that_is_not_there_fails_an_examination() -> None:
    report = without_cluster(examined(Neighbours()), "no Ray at 10.0.0.1:6379")
    assert report.verdict is Verdict.FAIL
    assert report.findings[-1].seen == "no Ray at 10.0.0.1:6379"
