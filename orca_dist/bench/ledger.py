"""Every request of a run beside the answer that it ought to get, and what became of it.

Pure: it is told what was sent and what came back. Counts each request once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from orca_dist.core import FinishReason, Output

log = logging.getLogger(__name__)

MAX_TOLD = 10  # faults that are logged one by one


class Verdict(StrEnum):
    """What became of a request."""

    RIGHT = "right"
    LOST = "lost"  # it ended with an error, or never
    DUPLICATED = "duplicated"  # some of its tokens came twice, or something after its end
    DIFFERING = "differing"  # other tokens, or another reason to end


@dataclass(slots=True)
class Answer:
    """What came back for one request so far; `reason` None: it has not ended."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    message: str = ""

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self.reason, self.message = output.reason, output.message


ENDED_WELL = frozenset({FinishReason.STOP, FinishReason.LENGTH})


def judge(answer: Answer, expected: Answer | None) -> Verdict:
    """`expected` is what came without any fault; None: whatever ends well is right."""
    if answer.reason not in ENDED_WELL:
        return Verdict.LOST
    if expected is None:
        return Verdict.RIGHT
    if len(answer.tokens) > len(expected.tokens):
        return Verdict.DUPLICATED
    right = (answer.tokens, answer.reason) == (expected.tokens, expected.reason)
    return Verdict.RIGHT if right else Verdict.DIFFERING


class Ledger:
    """Requests by their ids; `live` holds those that have not ended."""

    def __init__(self) -> None:
        self.live: dict[int, Answer] = {}
        self._expected: dict[int, Answer | None] = {}
        self._verdicts: dict[int, Verdict] = {}  # of those that have ended

    def sent(self, id: int, expected: Answer | None = None) -> Answer:
        """Returns what will hold its answer."""
        self._expected[id] = expected
        self.live[id] = answer = Answer()
        return answer

    def note(self, outputs: Iterable[Output]) -> None:
        """What comes after a request's end, or for one that was never sent, is a duplicate."""
        for output in outputs:
            answer = self.live.get(output.id)
            if answer is None:
                self._set(output.id, Verdict.DUPLICATED, "something came after its end")
                continue
            answer.add(output)
            if answer.reason:
                self._end(output.id)

    def give_up(self, why: str) -> None:
        """Those that live now will never end."""
        for id in list(self.live):
            del self.live[id], self._expected[id]
            self._set(id, Verdict.LOST, why)

    @property
    def num_ended(self) -> int:
        return len(self._verdicts)

    @property
    def num_wrong(self) -> int:
        return len(self._verdicts) - self.count(Verdict.RIGHT)

    def count(self, verdict: Verdict) -> int:
        return list(self._verdicts.values()).count(verdict)

    def _end(self, id: int) -> None:
        answer, expected = self.live.pop(id), self._expected.pop(id)
        verdict = judge(answer, expected)
        self._set(id, verdict, f"{answer} instead of {expected}")

    def _set(self, id: int, verdict: Verdict, why: str) -> None:
        self._verdicts[id] = verdict
        if verdict is not Verdict.RIGHT and self.num_wrong <= MAX_TOLD:
            log.error("request %d is %s: %s", id, verdict, why)
