"""The split that a measured run speaks for: the best there is, stages of unequal speed included."""

from __future__ import annotations

import pytest

from orca_dist.bench.best_split import best_split, idle_share
from orca_dist.core import split_layers, stage_costs
from tests.fixtures.splits import all_splits


def test_the_head_moves_layers_away_from_the_last_stage() -> None:
    """15 layers took 30 s, 15 and the head 34."""
    split = best_split([15, 15], [30.0, 34.0], head_s=4.0)
    assert split.sizes == (16, 14)
    assert split.idle_share_now == pytest.approx(1 - 32 / 34)
    assert split.idle_share == 0


def test_a_slow_stage_gets_fewer_layers() -> None:
    """Of one second, two and one a layer."""
    split = best_split([4, 4, 4], [4.0, 8.0, 4.0], head_s=0.0)
    assert split.sizes == (5, 2, 5)
    assert split.idle_share < split.idle_share_now


def test_what_is_measured_does_not_depend_on_the_split_that_ran() -> None:
    layer_s, head_s = [1.0, 3.0, 1.5], [0.0, 0.0, 2.5]
    found = {
        best_split(sizes, stage_costs(sizes, layer_s, head_s), head_s[-1]).sizes
        for sizes in all_splits(12, 3)
    }
    assert len(found) == 1


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("layer_s", [(1.0, 1.0, 1.0, 1.0), (1.0, 2.5, 0.7, 1.3)])
@pytest.mark.parametrize("head_s", [0.0, 0.3, 4.0, 40.0])
def test_no_split_is_faster(num_stages: int, layer_s: tuple[float, ...], head_s: float) -> None:
    layers, fixed_s = layer_s[:num_stages], [0.0] * (num_stages - 1) + [head_s]
    sizes = [len(each) for each in split_layers(9, num_stages)]
    split = best_split(sizes, stage_costs(sizes, layers, fixed_s), head_s)
    slowest = [max(stage_costs(each, layers, fixed_s)) for each in all_splits(9, num_stages)]
    assert max(stage_costs(split.sizes, layers, fixed_s)) == pytest.approx(min(slowest))


def test_stages_that_did_nothing_are_not_idle() -> None:
    assert idle_share([0.0, 0.0]) == 0
