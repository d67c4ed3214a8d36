"""Room for two and a half of eight streams: they end with the tokens they have alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.core import Sampling
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config

MAX_TOKENS = 40
KV_TOKENS = 192  # in blocks of 16; a request comes to need 80
PROMPTS = [[(7 * i + 3 * k) % 320 for k in range(33 + i)] for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Each alone, with reserved memory."""
    with live(folder, local_config(1, memory="reserve")) as front:
        return [front.wait([_submit(front, i)])[0].tokens for i in range(len(PROMPTS))]


def _submit(front: Front, index: int) -> int:
    """Every other one is seeded."""
    sampling = Sampling(temperature=float(index % 2), seed=index)
    return front.submit(PROMPTS[index], MAX_TOKENS, sampling)


@pytest.mark.parametrize("prefix_cache", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_preempted_streams_keep_their_tokens(
    folder: Path, expected: list[list[int]], prefix_cache: str
) -> None:
    config = local_config(3, kv_tokens=KV_TOKENS, prefix_cache=prefix_cache)
    with live(folder, config) as front:
        answers = front.wait([_submit(front, i) for i in range(len(PROMPTS))])
        load = front.engine.load()
    assert [answer.tokens for answer in answers] == expected
    assert load.preempted > 0
    assert (load.live_requests, load.waiting_requests, load.used_slots) == (0, 0, 0)
