"""The sampler: its stream of numbers, what top-k, top-p and min-p keep, and frequencies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from orca_dist.proto.v1.control_pb2 import Sampling
from orca_dist.stage.sampler import sample_row, uniform

MAX_SEED = 2**64 - 1
SEEDS = (0, 1, 42, 2**63 - 1, 2**63, MAX_SEED)

# Token -> probability; the likeliest is not the first.
PROBS = (0.15, 0.4, 0.05, 0.3, 0.1)
LOGITS_V = torch.tensor(PROBS).log()


def sampling(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 7,
) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def draw(logits_V: torch.Tensor, how: Sampling, num: int) -> Counter[int]:
    """Tokens of `num` positions."""
    return Counter(sample_row(logits_V, how, position) for position in range(num))


def chi_square(counts: Counter[int], probs: Sequence[float]) -> float:
    num = sum(counts.values())
    return sum((counts[i] - num * p) ** 2 / (num * p) for i, p in enumerate(probs) if p)


# ---- the stream of numbers ---------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_numbers_are_in_the_half_open_unit_interval(seed: int) -> None:
    numbers = [uniform(seed, position) for position in (*range(5000), 2**31, 2**40, MAX_SEED)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_positions_of_a_seed_are_spread_evenly(seed: int) -> None:
    bins = Counter(int(uniform(seed, position) * 20) for position in range(5000))
    assert chi_square(bins, [1 / 20] * 20) < 50


@pytest.mark.parametrize("position", [0, 1, 4095])
def test_seeds_at_a_position_are_spread_evenly(position: int) -> None:
    bins = Counter(int(uniform(seed, position) * 20) for seed in range(5000))
    assert chi_square(bins, [1 / 20] * 20) < 50


def test_neighbours_are_independent() -> None:
    """Pairs of the next position, the next seed, and of seed and position exchanged."""
    for other in ((0, 1), (1, 0), (1, -1)):
        pairs = Counter(
            int(uniform(seed, at) * 5) * 5 + int(uniform(seed + other[0], at + other[1]) * 5)
            for seed in range(1, 101)
            for at in range(1, 101)
        )
        assert chi_square(pairs, [1 / 25] * 25) < 60


def test_the_same_seed_and_position_give_the_same_number() -> None:
    numbers = {(seed, at): uniform(seed, at) for seed in SEEDS for at in range(50)}
    assert all(uniform(seed, at) == number for (seed, at), number in numbers.items())
    assert len(set(numbers.values())) == len(numbers)


def test_the_stream_never_changes() -> None:
    """Seeds that people have written down keep their meaning."""
    numbers = [uniform(0, 0), uniform(42, 3), uniform(MAX_SEED, 100)]
    assert numbers == [0.6524484863740322, 0.9816685560524754, 0.21773824072746173]


# ---- greedy ------------------------------------------------------------


def test_temperature_zero_is_argmax() -> None:
    logits_RV = torch.randn(200, 320, generator=torch.Generator().manual_seed(0))
    for position, logits_V in enumerate(logits_RV):
        how = sampling(temperature=0, top_k=5, top_p=0.1, min_p=0.3, seed=position)
        assert sample_row(logits_V, how, position) == int(logits_V.argmax())


def test_of_equal_logits_the_first_is_the_greedy_one() -> None:
    assert sample_row(torch.tensor([1.0, 3.0, 3.0, 3.0]), sampling(temperature=0), 0) == 1
    assert sample_row(torch.tensor([1.0, 3.0, 3.0, 3.0]), sampling(top_k=1), 0) == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-46, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(draw(LOGITS_V, sampling(temperature=temperature), 50)) == {1}


@pytest.mark.parametrize("how", [sampling(top_k=1), sampling(min_p=1), sampling(top_p=1e-9)])
def test_the_likeliest_token_always_stays(how: Sampling) -> None:
    assert set(draw(LOGITS_V, how, 50)) == {1}


# ---- what is kept ------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (sampling(), {0, 1, 2, 3, 4}),
        (sampling(top_k=2), {1, 3}),
        (sampling(top_k=4), {0, 1, 3, 4}),
        (sampling(top_k=5), {0, 1, 2, 3, 4}),
        (sampling(top_k=1000), {0, 1, 2, 3, 4}),
        (sampling(top_p=0.39), {1}),
        (sampling(top_p=0.41), {1, 3}),
        (sampling(top_p=0.69), {1, 3}),
        (sampling(top_p=0.71), {0, 1, 3}),
        (sampling(top_p=0.96), {0, 1, 2, 3, 4}),
        (sampling(min_p=0.12), {0, 1, 2, 3, 4}),
        (sampling(min_p=0.2), {0, 1, 3, 4}),
        (sampling(min_p=0.7), {1, 3}),
        (sampling(min_p=0.76), {1}),
        (sampling(top_k=4, min_p=0.3), {0, 1, 3}),
        (sampling(top_p=0.9, min_p=0.7), {1, 3}),
    ],
    ids=str,
)
def test_exactly_these_tokens_are_kept(how: Sampling, kept: set[int]) -> None:
    assert set(draw(LOGITS_V, how, 300)) == kept


def test_top_p_counts_within_what_top_k_left() -> None:
    """0.72 of 0.85 is 0.61: two tokens hold it; 0.72 of all takes three."""
    assert set(draw(LOGITS_V, sampling(top_k=3, top_p=0.72), 300)) == {1, 3}
    assert set(draw(LOGITS_V, sampling(top_p=0.72), 300)) == {0, 1, 3}


def test_top_p_and_min_p_count_after_the_temperature() -> None:
    """At 0.5 the probabilities are as their squares: 0.16, 0.09, 0.0225 of 0.285."""
    assert set(draw(LOGITS_V, sampling(temperature=0.5, top_p=0.55), 300)) == {1}
    assert set(draw(LOGITS_V, sampling(temperature=0.5, min_p=0.57), 300)) == {1}


def test_impossible_tokens_are_never_picked() -> None:
    logits_V = torch.tensor([-math.inf, 1.0, -math.inf, 1.0, -math.inf])
    for how in (sampling(), sampling(top_k=4), sampling(top_p=0.999), sampling(temperature=100)):
        assert set(draw(logits_V, how, 300)) == {1, 3}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 3)])
@pytest.mark.parametrize("how", [sampling(), sampling(top_k=4)])
def test_the_ends_of_the_unit_interval_pick_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, how: Sampling, number: float, token: int
) -> None:
    monkeypatch.setattr("orca_dist.stage.sampler.uniform", lambda seed, position: number)
    assert sample_row(torch.tensor([-math.inf, 1.0, -math.inf, 1.0, -math.inf]), how, 0) == token


# ---- frequencies -------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_frequencies_are_the_probabilities(seed: int) -> None:
    assert chi_square(draw(LOGITS_V, sampling(seed=seed), 2000), PROBS) < 25


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_or_flattens(temperature: float) -> None:
    weights = [p ** (1 / temperature) for p in PROBS]
    probs = [weight / sum(weights) for weight in weights]
    counts = draw(LOGITS_V, sampling(temperature=temperature), 2000)
    assert chi_square(counts, probs) < 25


@pytest.mark.parametrize("how", [sampling(top_k=3), sampling(top_p=0.8), sampling(min_p=0.3)])
def test_what_is_kept_keeps_its_proportions(how: Sampling) -> None:
    probs = (0.15 / 0.85, 0.4 / 0.85, 0.0, 0.3 / 0.85, 0.0)
    assert chi_square(draw(LOGITS_V, how, 1000), probs) < 25


def test_the_token_depends_on_seed_and_position_alone() -> None:
    how = sampling(seed=3)
    tokens = [sample_row(LOGITS_V, how, position) for position in range(100)]
    again = [sample_row(LOGITS_V, how, position) for position in reversed(range(100))]
    assert tokens == again[::-1]
    assert tokens != [sample_row(LOGITS_V, sampling(seed=4), at) for at in range(100)]


def test_zero_is_a_seed_like_others() -> None:
    tokens = {
        seed: tuple(sample_row(LOGITS_V, sampling(seed=seed), at) for at in range(100))
        for seed in SEEDS
    }
    assert len(set(tokens.values())) == len(SEEDS)


# ---- rows that can't be sampled ----------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("how", [sampling(), sampling(temperature=0), sampling(top_p=0.5)])
def test_a_row_that_is_not_finite_raises(bad: float, how: Sampling) -> None:
    logits_V = LOGITS_V.clone()
    logits_V[2] = bad
    with pytest.raises(ValueError, match="position 17 are not finite"):
        sample_row(logits_V, how, 17)


def test_a_row_without_any_possible_token_raises() -> None:
    with pytest.raises(ValueError, match="not finite"):
        sample_row(torch.full((5,), -math.inf), sampling(), 0)
