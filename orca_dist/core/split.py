"""Which layers each stage holds: contiguous, every layer once; and how many make stages equal."""

from __future__ import annotations

from collections.abc import Sequence


def split_layers(
    num_layers: int, num_stages: int, sizes: Sequence[int] | None = None
) -> list[range]:
    """Ranges of layers, one a stage.

    Without `sizes` they differ by at most one, the longer ones first. Raises
    ValueError with the numbers when a stage would hold no layer or the sizes
    don't add up.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"stages = {num_stages}: a model of {num_layers} layers takes 1 to {num_layers} stages"
        )
    if sizes is None:
        base, longer = divmod(num_layers, num_stages)
        sizes = [base + (stage < longer) for stage in range(num_stages)]
    _check_sizes(sizes, num_layers, num_stages)
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def sizes_by_cost(
    num_layers: int, layer_costs: Sequence[float], fixed_costs: Sequence[float]
) -> list[int]:
    """Layers of each stage, at least one, such that the slowest is as fast as it can be.

    `layer_costs`: of one layer on each stage; `fixed_costs`: what a stage has to do besides.
    Layer by layer to the stage that is done first with it; so none could be moved for a gain.
    """
    sizes = [1] * len(layer_costs)
    for _ in range(num_layers - len(sizes)):
        costs = stage_costs([size + 1 for size in sizes], layer_costs, fixed_costs)
        sizes[costs.index(min(costs))] += 1
    return sizes


def stage_costs(
    sizes: Sequence[int], layer_costs: Sequence[float], fixed_costs: Sequence[float]
) -> list[float]:
    """What each stage costs with so many layers."""
    columns = zip(sizes, layer_costs, fixed_costs, strict=True)
    return [size * layer + fixed for size, layer, fixed in columns]


def _check_sizes(sizes: Sequence[int], num_layers: int, num_stages: int) -> None:
    text = ",".join(map(str, sizes))
    if len(sizes) != num_stages:
        raise ValueError(
            f"split = {text}: {len(sizes)} sizes for {num_stages} stages: "
            f"add --stages {len(sizes)}, or give {num_stages} sizes"
        )
    if min(sizes) < 1:
        raise ValueError(f"split = {text}: every stage needs at least one layer")
    if sum(sizes) != num_layers:
        raise ValueError(
            f"split = {text}: adds up to {sum(sizes)} layers, the model has {num_layers}"
        )
