"""Layers over stages: every layer once, contiguous, sizes that differ by one at most."""

from __future__ import annotations

import re

import pytest

from orca_dist.core import split_layers


def sizes_of(num_layers: int, num_stages: int, sizes: list[int] | None = None) -> list[int]:
    return [len(layers) for layers in split_layers(num_layers, num_stages, sizes)]


@pytest.mark.parametrize("num_layers", range(1, 41))
def test_every_layer_once_and_evenly(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        ranges = split_layers(num_layers, num_stages)
        assert len(ranges) == num_stages
        assert [layer for layers in ranges for layer in layers] == list(range(num_layers))
        sizes = [len(layers) for layers in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [
        (10, 3, [4, 3, 3]),
        (30, 4, [8, 8, 7, 7]),
        (38, 8, [5, 5, 5, 5, 5, 5, 4, 4]),
        (7, 2, [4, 3]),
        (1, 1, [1]),
    ],
)
def test_default_sizes(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    assert sizes_of(num_layers, num_stages) == sizes


def test_explicit_sizes() -> None:
    assert split_layers(5, 3, [1, 3, 1]) == [range(1), range(1, 4), range(4, 5)]
    assert split_layers(30, 4, (8, 7, 7, 8))[3] == range(22, 30)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes", "message"),
    [
        (4, 5, None, "stages = 5: a model of 4 layers takes 1 to 4 stages"),
        (4, 0, None, "stages = 0: a model of 4 layers takes 1 to 4 stages"),
        (4, -1, None, "stages = -1: a model of 4 layers takes 1 to 4 stages"),
        (4, 5, [1, 1, 1, 1, 0], "stages = 5: a model of 4 layers takes 1 to 4 stages"),
        (5, 2, [2, 2], "split = 2,2: adds up to 4 layers, the model has 5"),
        (5, 2, [3, 3], "split = 3,3: adds up to 6 layers, the model has 5"),
        (5, 2, [5, 0], "split = 5,0: every stage needs at least one layer"),
        (5, 2, [6, -1], "split = 6,-1: every stage needs at least one layer"),
        (5, 2, [1, 3, 1], "split = 1,3,1: 3 sizes for 2 stages: add --stages 3, or give 2 sizes"),
        (5, 2, [5], "split = 5: 1 sizes for 2 stages: add --stages 1, or give 2 sizes"),
    ],
)
def test_refusals_say_the_numbers(
    num_layers: int, num_stages: int, sizes: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        split_layers(num_layers, num_stages, sizes)
