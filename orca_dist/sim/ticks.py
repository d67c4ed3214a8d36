"""The simplest cost: every iteration takes every stage the same time. For schedules alone."""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.core import Plan
from orca_dist.sim.pipeline import PlanTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class TickCost:
    """`stage_s` a stage and plan; activations take no time."""

    num_stages: int
    stage_s: float = 1.0

    def times(self, plan: Plan) -> PlanTimes:
        return PlanTimes([self.stage_s] * self.num_stages)
