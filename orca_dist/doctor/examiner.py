"""A node examined from within: the same object here, and behind a Ray actor elsewhere."""

from __future__ import annotations

from orca_dist.doctor.facts import Link, NodeFacts, Question
from orca_dist.doctor.gather import gather
from orca_dist.doctor.probe import Endpoint, ProbeListener, dial


class Examiner:
    """`node` is the node's name, `address` where others reach it."""

    def __init__(self, node: str, address: str) -> None:
        self._node = node
        self._address = address
        self._listener: ProbeListener | None = None

    def gather(self, question: Question) -> NodeFacts:
        """This node's facts."""
        return gather(self._node, self._address, question)

    def listen(self, token: bytes) -> Endpoint:
        """Listens for other nodes until close(); raises OSError."""
        self._listener = ProbeListener(self._address, token)
        return Endpoint(node=self._node, host=self._address, port=self._listener.port)

    def dial(self, endpoint: Endpoint, token: bytes) -> Link:
        """The way from here to another node that listens."""
        return dial(self._node, endpoint, token)

    def close(self) -> None:
        """Any number of times."""
        if self._listener is not None:
            self._listener.close()
