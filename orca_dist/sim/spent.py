"""Where a run's time went: a Cost that adds up what it is asked for."""

from __future__ import annotations

from collections import Counter

from orca_dist.core import Plan
from orca_dist.sim.batch import batch_shape
from orca_dist.sim.pipeline import PlanTimes
from orca_dist.sim.roofline import RooflineCost

LINK = "link"


class TalliedCost:
    """As `cost`, whose seconds `spent_s` adds up over plans: of the slowest stage, by its
    parts, and of the slowest link, as LINK."""

    def __init__(self, cost: RooflineCost) -> None:
        self.spent_s: Counter[str] = Counter()
        self._cost = cost

    @property
    def num_stages(self) -> int:
        return self._cost.num_stages

    def times(self, plan: Plan) -> PlanTimes:
        times, spent_s = self._cost.times(plan), self.spent_s
        slowest = max(range(self.num_stages), key=times.stage_s.__getitem__)
        part = self._cost.stage_time(batch_shape(plan), slowest)
        spent_s["matmul"] += part.matmul_s
        spent_s["attention"] += part.attention_s
        spent_s["all-reduce"] += part.allreduce_s
        spent_s["kernel launches"] += part.launch_s
        spent_s["embedding and head"] += part.embedding_s + part.head_s
        spent_s[LINK] += max(times.links_s[:-1], default=0.0)
        return times

    def largest(self) -> tuple[str, float]:
        """What takes most, and its share of a stage and the link after it."""
        (name, spent_s), *_ = self.spent_s.most_common(1)
        return name, spent_s / self.spent_s.total()
