"""The sampler: its stream of numbers, what top-k, top-p and min-p keep, and frequencies.

By the kernels of CPUs and by torch's, from a plan's entries on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from orca_kernels import sample as torch_sample
from orca_kernels.cpu import sample as cpu_sample
from orca_kernels.dispatch import Sample

from orca_dist.proto.v1.control_pb2 import Sampling
from orca_dist.stage import sampler
from orca_dist.stage.sampler import Sampled, asked_for, parameters, result_of

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


@pytest.fixture(params=["cpu", "torch"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return {"cpu": cpu_sample.sample, "torch": torch_sample.sample}[request.param]


def entry(
    how: Sampling, position: int, *, id: int = 0, rows: int = 1, samples: bool = True
) -> Sampled:
    return Sampled(id=id, rows=range(rows), samples=samples, position=position, sampling=how)


def tokens_at(
    sample: Sample, logits_V: torch.Tensor, how: Sampling, positions: Sequence[int]
) -> list[int]:
    """What one row of logits gives at each of them."""
    entries = [entry(how, position) for position in positions]
    return sample(logits_V.expand(len(entries), -1), parameters(entries)).tolist()


def draw(sample: Sample, logits_V: torch.Tensor, how: Sampling, num: int) -> Counter[int]:
    """Tokens of `num` positions."""
    return Counter(tokens_at(sample, logits_V, how, range(num)))


def uniform(seed: int, position: int) -> float:
    (number,) = uniforms([(seed, position)])
    return number


def uniforms(pairs: Iterable[tuple[int, int]]) -> list[float]:
    """The numbers of seeds, each at a position."""
    seeds, positions = zip(*pairs, strict=True)
    numbers: list[float] = sampler.uniform(
        np.array(seeds, np.uint64), np.array(positions, np.uint64)
    ).tolist()
    return numbers


def chi_square(counts: Counter[int], probs: Sequence[float]) -> float:
    num = sum(counts.values())
    return sum((counts[i] - num * p) ** 2 / (num * p) for i, p in enumerate(probs) if p)


# ---- the stream of numbers ---------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_numbers_are_in_the_half_open_unit_interval(seed: int) -> None:
    numbers = uniforms((seed, position) for position in (*range(5000), 2**31, 2**40, MAX_SEED))
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_positions_of_a_seed_are_spread_evenly(seed: int) -> None:
    numbers = uniforms((seed, position) for position in range(5000))
    bins = Counter(int(number * 20) for number in numbers)
    assert chi_square(bins, [1 / 20] * 20) < 50


@pytest.mark.parametrize("position", [0, 1, 4095])
def test_seeds_at_a_position_are_spread_evenly(position: int) -> None:
    numbers = uniforms((seed, position) for seed in range(5000))
    bins = Counter(int(number * 20) for number in numbers)
    assert chi_square(bins, [1 / 20] * 20) < 50


def test_neighbours_are_independent() -> None:
    """Pairs of the next position, the next seed, and of seed and position exchanged."""
    places = [(seed, at) for seed in range(1, 102) for at in range(102)]
    fifths = {at: int(number * 5) for at, number in zip(places, uniforms(places), strict=True)}
    for other in ((0, 1), (1, 0), (1, -1)):
        pairs = Counter(
            fifths[seed, at] * 5 + fifths[seed + other[0], at + other[1]]
            for seed in range(1, 101)
            for at in range(1, 101)
        )
        assert chi_square(pairs, [1 / 25] * 25) < 60


def test_the_same_seed_and_position_give_the_same_number() -> None:
    """Alone, and among others."""
    places = [(seed, at) for seed in SEEDS for at in range(50)]
    numbers = dict(zip(places, uniforms(places), strict=True))
    assert all(uniform(seed, at) == number for (seed, at), number in numbers.items())
    assert len(set(numbers.values())) == len(numbers)


def test_the_stream_never_changes() -> None:
    """Seeds that people have written down keep their meaning."""
    numbers = [uniform(0, 0), uniform(42, 3), uniform(MAX_SEED, 100)]
    assert numbers == [0.6524484863740322, 0.9816685560524754, 0.21773824072746173]


# ---- greedy ------------------------------------------------------------


def test_temperature_zero_is_argmax(sample: Sample) -> None:
    logits_RV = torch.randn(200, 320, generator=torch.Generator().manual_seed(0))
    for position, logits_V in enumerate(logits_RV):
        how = sampling(temperature=0, top_k=5, top_p=0.1, min_p=0.3, seed=position)
        assert tokens_at(sample, logits_V, how, [position]) == [int(logits_V.argmax())]


def test_of_equal_logits_the_first_is_the_greedy_one(sample: Sample) -> None:
    for how in (sampling(temperature=0), sampling(top_k=1)):
        assert tokens_at(sample, torch.tensor([1.0, 3.0, 3.0, 3.0]), how, [0]) == [1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-46, 5e-324])
def test_a_tiny_temperature_is_greedy(sample: Sample, temperature: float) -> None:
    assert set(draw(sample, LOGITS_V, sampling(temperature=temperature), 50)) == {1}


@pytest.mark.parametrize("how", [sampling(top_k=1), sampling(min_p=1), sampling(top_p=1e-9)])
def test_the_likeliest_token_always_stays(sample: Sample, how: Sampling) -> None:
    assert set(draw(sample, LOGITS_V, how, 50)) == {1}


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
def test_exactly_these_tokens_are_kept(sample: Sample, how: Sampling, kept: set[int]) -> None:
    assert set(draw(sample, LOGITS_V, how, 300)) == kept


def test_top_p_counts_within_what_top_k_left(sample: Sample) -> None:
    """0.72 of 0.85 is 0.61: two tokens hold it; 0.72 of all takes three."""
    assert set(draw(sample, LOGITS_V, sampling(top_k=3, top_p=0.72), 300)) == {1, 3}
    assert set(draw(sample, LOGITS_V, sampling(top_p=0.72), 300)) == {0, 1, 3}


def test_top_p_and_min_p_count_after_the_temperature(sample: Sample) -> None:
    """At 0.5 the probabilities are as their squares: 0.16, 0.09, 0.0225 of 0.285."""
    assert set(draw(sample, LOGITS_V, sampling(temperature=0.5, top_p=0.55), 300)) == {1}
    assert set(draw(sample, LOGITS_V, sampling(temperature=0.5, min_p=0.57), 300)) == {1}


def test_impossible_tokens_are_never_picked(sample: Sample) -> None:
    logits_V = torch.tensor([-math.inf, 1.0, -math.inf, 1.0, -math.inf])
    for how in (sampling(), sampling(top_k=4), sampling(top_p=0.999), sampling(temperature=100)):
        assert set(draw(sample, logits_V, how, 300)) == {1, 3}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-53, 3)])
@pytest.mark.parametrize("how", [sampling(), sampling(top_k=4)])
def test_the_ends_of_the_unit_interval_pick_possible_tokens(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, how: Sampling, number: float, token: int
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seeds, positions: np.array([number]))
    logits_V = torch.tensor([-math.inf, 1.0, -math.inf, 1.0, -math.inf])
    assert tokens_at(sample, logits_V, how, [0]) == [token]


# ---- frequencies -------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_frequencies_are_the_probabilities(sample: Sample, seed: int) -> None:
    assert chi_square(draw(sample, LOGITS_V, sampling(seed=seed), 2000), PROBS) < 25


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_or_flattens(sample: Sample, temperature: float) -> None:
    weights = [p ** (1 / temperature) for p in PROBS]
    probs = [weight / sum(weights) for weight in weights]
    counts = draw(sample, LOGITS_V, sampling(temperature=temperature), 2000)
    assert chi_square(counts, probs) < 25


@pytest.mark.parametrize("how", [sampling(top_k=3), sampling(top_p=0.8), sampling(min_p=0.3)])
def test_what_is_kept_keeps_its_proportions(sample: Sample, how: Sampling) -> None:
    probs = (0.15 / 0.85, 0.4 / 0.85, 0.0, 0.3 / 0.85, 0.0)
    assert chi_square(draw(sample, LOGITS_V, how, 1000), probs) < 25


def test_the_token_depends_on_seed_and_position_alone(sample: Sample) -> None:
    how = sampling(seed=3)
    tokens = tokens_at(sample, LOGITS_V, how, range(100))
    again = tokens_at(sample, LOGITS_V, how, range(99, -1, -1))
    assert tokens == again[::-1]
    assert tokens[17:18] == tokens_at(sample, LOGITS_V, how, [17])
    assert tokens != tokens_at(sample, LOGITS_V, sampling(seed=4), range(100))


def test_zero_is_a_seed_like_others(sample: Sample) -> None:
    tokens = {
        seed: tuple(tokens_at(sample, LOGITS_V, sampling(seed=seed), range(100))) for seed in SEEDS
    }
    assert len(set(tokens.values())) == len(SEEDS)


# ---- rows that can't be sampled ----------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", [sampling(), sampling(temperature=0), sampling(top_p=0.5)])
def test_a_row_that_is_not_finite_fails_alone(sample: Sample, bad: float, how: Sampling) -> None:
    """One NaN or infinity is enough, and so is a row without any possible token."""
    logits_RV = LOGITS_V.repeat(3, 1)
    logits_RV[1, 2 if bad > -math.inf or bad != bad else slice(None)] = bad
    entries = [entry(how, 17 + i, id=i) for i in range(3)]
    tokens = sample(logits_RV, parameters(entries)).tolist()
    result = result_of(5, entries, tokens, [])
    assert result.seq == 5
    assert list(result.ids) == [0, 2]
    assert list(result.tokens) == [tokens[0], tokens[2]]
    (failed,) = result.failed
    assert (failed.id, failed.message) == (1, "the logits at position 18 are not finite")


# ---- entries of a plan -------------------------------------------------


def test_of_several_rows_the_last_one_samples(sample: Sample) -> None:
    """An entry that returns logits has a row for each of its tokens, and may sample none."""
    greedy = sampling(temperature=0)
    entries = [
        entry(greedy, 4, rows=3),
        entry(greedy, 9, rows=2, samples=False),
        entry(greedy, 7),
    ]
    tokens = sample(10 * torch.eye(6), parameters(entries)).tolist()
    assert tokens == [2, 5]


def test_logits_go_to_those_who_asked_and_have_not_failed() -> None:
    asks, plain = Sampling(return_logits=True), Sampling()
    entries = [
        entry(asks, 3, id=1, rows=2),
        entry(plain, 3, id=2),
        entry(asks, 3, id=3, rows=1),
        entry(asks, 3, id=4, rows=2, samples=False),
    ]
    logits_RV = torch.arange(24.0).view(6, 4)
    rows = asked_for(entries, logits_RV)
    assert [x_LV[:, 0].tolist() for x_LV in rows] == [[0.0, 4.0], [12.0], [16.0, 20.0]]
    result = result_of(1, entries, [11, 12, -1], rows)
    assert list(result.ids) == [1, 2]
    assert list(result.tokens) == [11, 12]
    assert [failed.id for failed in result.failed] == [3]
    assert [logits.id for logits in result.logits] == [1, 4]
    assert result.logits[1].rows == logits_RV[4:].numpy().tobytes()
