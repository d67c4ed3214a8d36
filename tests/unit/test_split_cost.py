"""The automatic split: never slower than the even one by its own measure, and the best there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orca_dist.core import split_layers
from orca_dist.spec import Experts, parse_spec
from orca_dist.spec.split_cost import (
    EXPECTED_LEN,
    SAMPLED_SHARE,
    balanced_sizes,
    head_layers,
    layer_cost,
    slowest,
)
from tests.fixtures.splits import all_splits

SMOLLM2 = parse_spec(
    {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    }
)


def even(num_layers: int, num_stages: int) -> list[int]:
    return [len(each) for each in split_layers(num_layers, num_stages)]


def test_a_layer_is_counted_by_hand() -> None:
    matrices = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536
    assert layer_cost(SMOLLM2) == matrices + 2 * 576 * EXPECTED_LEN / 2
    assert head_layers(SMOLLM2) == SAMPLED_SHARE * 49152 * 576 / layer_cost(SMOLLM2)


def test_windows_and_short_models_see_less() -> None:
    every_other = tuple(range(0, 30, 2))
    windowed = replace(SMOLLM2, sliding_window=128, sliding_layers=every_other)
    assert layer_cost(SMOLLM2) - layer_cost(windowed) == 2 * 576 * (512 - 128) / 2
    short = replace(SMOLLM2, max_model_len=256)
    assert layer_cost(SMOLLM2) - layer_cost(short) == 2 * 576 * (512 - 128)


def test_of_experts_those_count_that_a_row_goes_through() -> None:
    """In a third of the layers: a router of 64, and 4 of them."""
    experts = Experts(
        num_experts=64,
        num_chosen=4,
        intermediate_size=100,
        normalised=True,
        rounds_shares=False,
        layers=tuple(range(0, 30, 3)),
    )
    more = 576 * 64 + 4 * 3 * 576 * 100 - 3 * 576 * 1536
    mixed = layer_cost(replace(SMOLLM2, experts=experts))
    assert mixed - layer_cost(SMOLLM2) == pytest.approx(more / 3)


@pytest.mark.parametrize(
    ("num_stages", "sizes"), [(1, None), (2, (16, 14)), (4, (8, 8, 8, 6)), (30, None)]
)
def test_the_demo_model(num_stages: int, sizes: tuple[int, ...] | None) -> None:
    assert balanced_sizes(SMOLLM2, num_stages) == sizes


@pytest.mark.parametrize("vocab_size", [100, 8_000, 49_152, 256_000, 2_000_000])
@pytest.mark.parametrize("num_layers", [1, 2, 5, 9])
def test_no_split_is_better_by_a_layer(vocab_size: int, num_layers: int) -> None:
    """And what is chosen is contiguous, whole and leaves no stage empty."""
    spec = replace(SMOLLM2, vocab_size=vocab_size, num_layers=num_layers)
    head = head_layers(spec)
    for num_stages in range(1, num_layers + 1):
        chosen = balanced_sizes(spec, num_stages)
        sizes = list(chosen or even(num_layers, num_stages))
        assert (sum(sizes), len(sizes), min(sizes) >= 1) == (num_layers, num_stages, True)
        best = min(slowest(split, head) for split in all_splits(num_layers, num_stages))
        if chosen:
            assert slowest(sizes, head) == best
            assert slowest(sizes, head) <= slowest(even(num_layers, num_stages), head) - 1 + 1e-9
        else:
            assert slowest(sizes, head) < best + 1


def test_without_a_head_it_is_the_even_one() -> None:
    """Layer by layer the same, longer stages first."""
    spec = replace(SMOLLM2, vocab_size=1)
    assert all(balanced_sizes(spec, stages) is None for stages in range(1, 31))
