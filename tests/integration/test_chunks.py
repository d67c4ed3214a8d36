"""A long prompt in pieces on four stages: they follow each other, or wait, as configured.

Stages take 20 ms longer over each plan than they need, so that the order of
their spans doesn't hang on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orca_dist.metrics.trace import PlanTrace
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import live, local_config, slow_placement

STAGES, LAST = 4, 3
PROMPT = [(17 * i + i // 320) % 320 for i in range(2000)]
MAX_BATCH_TOKENS = 256
NUM_CHUNKS = 8
CHUNKS = [256] * 7 + [208]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"), max_model_len=2048)


def _answer(folder: Path, overlap: bool) -> tuple[list[int], list[PlanTrace]]:
    """The long prompt's tokens, and the plans up to its first token."""
    config = local_config(
        STAGES, max_batch_tokens=MAX_BATCH_TOKENS, chunk_overlap="on" if overlap else "off"
    )
    with live(folder, config, placement=slow_placement()) as front:
        (answer,) = front.generate([PROMPT], max_tokens=3)
        plans = front.trace()
    assert [sum(plan.lengths) for plan in plans] == [*CHUNKS, 1, 1]
    return answer.tokens, plans[:NUM_CHUNKS]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """Its tokens on one stage, in one piece."""
    with live(folder, local_config(1, chunked_prefill="off")) as front:
        (answer,) = front.generate([PROMPT], max_tokens=3)
        assert [sum(plan.lengths) for plan in front.trace()] == [2000, 1, 1]
    return answer.tokens


def test_chunks_follow_each_other(folder: Path, expected: list[int]) -> None:
    tokens, plans = _answer(folder, overlap=True)
    assert tokens == expected
    assert not any(_waited(plans, chunk) for chunk in range(1, NUM_CHUNKS))
    assert _stage_times(plans) == NUM_CHUNKS + STAGES - 1


def test_chunks_wait_for_each_other(folder: Path, expected: list[int]) -> None:
    tokens, plans = _answer(folder, overlap=False)
    assert tokens == expected
    assert all(_waited(plans, chunk) for chunk in range(1, NUM_CHUNKS))
    assert _stage_times(plans) == NUM_CHUNKS * STAGES


def _waited(plans: Sequence[PlanTrace], chunk: int) -> bool:
    """The first stage began this chunk when the last one had ended the chunk before."""
    before, this = plans[chunk - 1], plans[chunk]
    return this.spans[0].compute_start_s >= before.spans[LAST].compute_end_s


def _stage_times(plans: Sequence[PlanTrace]) -> int:
    """Computations of a stage, one after the other, on the longest path to the first token.

    Each comes after the same stage's chunk before and the same chunk's stage before; a chunk
    that waited comes after the whole of the one before.
    """
    ends = [0] * STAGES
    for chunk in range(len(plans)):
        end = ends[LAST] if chunk and _waited(plans, chunk) else 0
        for stage in range(STAGES):
            end = ends[stage] = 1 + max(end, ends[stage])
    return end
