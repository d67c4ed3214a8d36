"""A7: a seeded request draws the same tokens whatever runs beside it, on any number of stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_dist.core import Sampling
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config

PROMPT, MAX_TOKENS, SEED = [5, 9, 17], 16, 42


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loud")
    loud_llama(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def front(folder: Path, request: pytest.FixtureRequest) -> Iterator[Front]:
    with live(folder, local_config(request.param)) as front:
        yield front


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """The tokens on one stage, alone, in an engine of their own."""
    with live(folder, local_config(1)) as front:
        return front.generate([PROMPT], MAX_TOKENS, _seeded(SEED))[0].tokens


def _seeded(seed: int) -> Sampling:
    return Sampling(temperature=1.0, seed=seed)


def _beside(front: Front, others: list[tuple[list[int], int]], last: bool = False) -> list[int]:
    """The seeded request's tokens while `others` (prompt, seed) run."""
    before = [front.submit(p, MAX_TOKENS, _seeded(s)) for p, s in others] if last else []
    mine = front.submit(PROMPT, MAX_TOKENS, _seeded(SEED))
    after = [] if last else [front.submit(p, MAX_TOKENS, _seeded(s)) for p, s in others]
    answers = front.wait([mine, *before, *after])
    return answers[0].tokens


def test_alone_and_again(front: Front, expected: list[int]) -> None:
    assert len(set(expected)) > 4
    for _ in range(2):
        assert front.generate([PROMPT], MAX_TOKENS, _seeded(SEED))[0].tokens == expected


@pytest.mark.parametrize("last", [False, True])
def test_beside_others(front: Front, expected: list[int], last: bool) -> None:
    same_seed = [(PROMPT, SEED + i) for i in range(1, 4)]
    mixed_len = [([7], 1), (list(range(40)), 2), (list(range(50, 170)), 3)]
    assert _beside(front, same_seed, last) == expected
    assert _beside(front, mixed_len, last) == expected


def test_after_a_hundred_others(front: Front, expected: list[int]) -> None:
    front.generate([[i % 300, 3] for i in range(100)], 3, _seeded(1))
    assert front.generate([PROMPT], MAX_TOKENS, _seeded(SEED))[0].tokens == expected


def test_other_seeds_differ(front: Front, expected: list[int]) -> None:
    for seed in (0, 1, 2**63 - 1, 2**64 - 1):
        answers = front.generate([PROMPT, PROMPT], MAX_TOKENS, _seeded(seed))
        assert answers[0].tokens == answers[1].tokens != expected
