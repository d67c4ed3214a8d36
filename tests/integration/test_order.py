"""Stages stay in step: random delays, random aborts and any first batch change no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_dist.engine.local_pipeline import LocalPlacement
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config

PROMPTS = [[5, 9, 17], [300], list(range(40, 60)), [7, 7, 7]]
STAGES, ROUNDS, MAX_TOKENS = 3, 20, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    placement = LocalPlacement("tests.fixtures.jittery_stage")
    with live(folder, local_config(STAGES), placement=placement) as front:
        yield front


def test_first_batch_of_120_tokens(front: Front) -> None:
    """B11: the links exist before the first plan, whatever its size."""
    (answer,) = front.generate([list(range(120))], 2)
    assert len(answer.tokens) == 2


@pytest.mark.slow
def test_random_delays_change_nothing(front: Front) -> None:
    """B10: the same answers, and every stage ran every plan, in order, twenty times over."""
    expected = [front.generate([prompt], MAX_TOKENS)[0].tokens for prompt in PROMPTS]
    for _ in range(ROUNDS):
        answers = front.generate(PROMPTS, MAX_TOKENS)
        assert [answer.tokens for answer in answers] == expected
    _check_in_step(front)


@pytest.mark.slow
def test_random_aborts_change_nothing(front: Front) -> None:
    """B9: four at once, two aborted at random iterations; the others equal their solo output."""
    rng = random.Random(9)
    expected = [front.generate([prompt], MAX_TOKENS)[0].tokens for prompt in PROMPTS]
    for _ in range(ROUNDS):
        ids = [front.submit(prompt, MAX_TOKENS) for prompt in PROMPTS]
        aborted = rng.sample(range(4), 2)
        for index in aborted:
            front.wait([ids[index]], num_tokens=rng.randrange(MAX_TOKENS))
            front.cancel(ids[index])
        for answer, tokens in zip(front.wait(ids), expected, strict=True):
            assert answer.tokens == tokens[: len(answer.tokens)]
        survivors = set(range(4)) - set(aborted)
        assert all(front.answers[ids[i]].tokens == expected[i] for i in survivors)
    _check_in_step(front)


def _check_in_step(front: Front) -> None:
    for stage in range(STAGES):
        starts = [plan.spans[stage].compute_start_s for plan in front.trace()]
        assert starts == sorted(starts)
