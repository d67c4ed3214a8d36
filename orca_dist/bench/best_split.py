"""By which split the stages of a measured run would have taken equally long: for `--split`.

What a stage took in all is its layers', each the same; but for the rows that it sampled (the
output head), which stay at the end of the pipeline wherever the layers go. Stages may be of
unequal speed: each is asked what its own layers took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orca_dist.core import sizes_by_cost, stage_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSplit:
    """`idle_share`: of all stages' time, what is spent waiting for the slowest; as it was run,
    `idle_share_now`."""

    sizes: tuple[int, ...]
    idle_share: float
    idle_share_now: float


def best_split(sizes: Sequence[int], busy_s: Sequence[float], head_s: float) -> BestSplit:
    """`sizes`: layers of each stage; `busy_s`: what it computed in all; `head_s`: of the last."""
    fixed_s = [0.0] * (len(sizes) - 1) + [min(head_s, busy_s[-1])]
    layer_s = [
        (busy - fixed) / size for busy, fixed, size in zip(busy_s, fixed_s, sizes, strict=True)
    ]
    best = sizes_by_cost(sum(sizes), layer_s, fixed_s)
    return BestSplit(
        sizes=tuple(best),
        idle_share=idle_share(stage_costs(best, layer_s, fixed_s)),
        idle_share_now=idle_share(busy_s),
    )


def idle_share(busy_s: Sequence[float]) -> float:
    """1 - mean / slowest."""
    slowest_s = max(busy_s)
    return 1 - sum(busy_s) / len(busy_s) / slowest_s if slowest_s else 0.0
