"""A plan on its way through the stages."""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.core.plan import Plan, PlanResult
from orca_dist.core.request import Entry


@dataclass(frozen=True, slots=True)
class Flight:
    """With the entries of the plan's columns, and the ids that will answer."""

    plan: Plan
    entries: list[Entry]
    sampled: list[int]
    sent_s: float

    @property
    def unfinished(self) -> list[Entry]:
        """In the middle of their prompt: no token returns for them."""
        pairs = zip(self.entries, self.plan.samples, strict=True)
        return [entry for entry, samples in pairs if not samples]

    def check_answered(self, result: PlanResult) -> None:
        """A stage that leaves a request without an answer would leave it in the pool for ever."""
        seq = self.plan.seq
        assert seq == result.seq, f"plan {result.seq} came back before plan {seq}"
        if result.ids != self.sampled or result.failed:
            answered = {*result.ids, *result.failed}
            assert answered == set(self.sampled), f"plan {seq} came back incomplete"
        assert all(result.tokens), f"plan {seq} came back without tokens"
