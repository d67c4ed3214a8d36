"""Where a run's time went: a Cost that adds up what it is asked for."""

from __future__ import annotations

from orca_dist.core import Plan
from orca_dist.sim.batch import batch_shape
from orca_dist.sim.pipeline import PlanTimes
from orca_dist.sim.roofline import RooflineCost

EVERY = 16  # plans, of which one is looked at: enough to see where time goes


class TalliedCost:
    """As `cost`; `spent_s` adds up the seconds of every 16th plan: of its slowest stage, by
    parts, and of its slowest link."""

    def __init__(self, cost: RooflineCost) -> None:
        self.spent_s: dict[str, float] = {}
        self._cost = cost

    @property
    def num_stages(self) -> int:
        return self._cost.num_stages

    def times(self, plan: Plan) -> PlanTimes:
        times = self._cost.times(plan)
        if plan.seq % EVERY == 0:
            self._look_at(plan, times)
        return times

    def _look_at(self, plan: Plan, times: PlanTimes) -> None:
        slowest = max(range(self.num_stages), key=times.stage_s.__getitem__)
        part = self._cost.stage_time(batch_shape(plan), slowest)
        self._add("matmul", part.matmul_s)
        self._add("attention", part.attention_s)
        self._add("all-reduce", part.allreduce_s)
        self._add("kernel launches", part.launch_s)
        self._add("embedding and head", part.embedding_s + part.head_s)
        self._add("link", max(times.links_s[:-1], default=0.0))

    def _add(self, name: str, seconds: float) -> None:
        self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds

    def largest(self) -> tuple[str, float]:
        """What takes most, and its share of a stage and the link after it."""
        name = max(self.spent_s, key=self.spent_s.__getitem__)
        return name, self.spent_s[name] / sum(self.spent_s.values())
