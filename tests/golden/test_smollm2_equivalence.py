"""Scheduling changes no bit of the demo model either, in fp32 and in bf16.

Wider matrices than the loud model's, so that kernels work on them in other
pieces: rows of 576 and 1536, a head of 49,152, and two threads on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orca_dist.core import Batching, MemoryKind, Request, Sampling
from orca_dist.text import ChatTemplate, Tokenizer
from tests.fixtures.equivalence import Reference, Run, noting_stages
from tests.fixtures.models import smollm2_folder  # noqa: F401  a fixture
from tests.fixtures.noting_stage import NotingWorker
from tests.fixtures.thread_pipeline import Arrivals, Schedule

QUESTIONS = ["Why is the sky blue?", "Hi!", "List three colours.", "What is 12 times 3?"]
PAGED = Schedule(memory=MemoryKind.PAGED)
FEW_BLOCKS = 20  # two requests fit, but not their answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What each request gives alone, and when they come."""

    dtype: str
    reference: Reference
    arrivals: Arrivals

    def run(self, stages: Sequence[NotingWorker], schedule: Schedule) -> Run:
        return self.reference.check(stages, schedule, [self.arrivals])


@pytest.fixture(scope="module")
def requests(smollm2_folder: Path) -> list[Request]:  # noqa: F811
    """Chats, whose template gives them the same beginning; every other one is seeded."""
    tokenizer, chat = Tokenizer.load(smollm2_folder), ChatTemplate.load(smollm2_folder)
    texts = [chat.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [
        Request(
            id=i,
            prompt=tuple(tokenizer.encode(text, add_special_tokens=False)),
            max_tokens=8,
            sampling=Sampling(temperature=float(i % 2), seed=i),
        )
        for i, text in enumerate(texts)
    ]


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def truth(
    smollm2_folder: Path,  # noqa: F811
    requests: list[Request],
    request: pytest.FixtureRequest,
) -> Truth:
    reference = Reference.load(smollm2_folder, request.param)
    reference.add(requests)
    arrivals = {0: requests[:2], 2: requests[2:]}
    return Truth(dtype=request.param, reference=reference, arrivals=arrivals)


@pytest.fixture(scope="module")
def one_stage(smollm2_folder: Path, truth: Truth) -> list[NotingWorker]:  # noqa: F811
    return noting_stages(smollm2_folder, 1, truth.dtype, num_threads=2)


@pytest.fixture(scope="module")
def two_stages(smollm2_folder: Path, truth: Truth) -> list[NotingWorker]:  # noqa: F811
    return noting_stages(smollm2_folder, 2, truth.dtype)


def test_batched_on_one_stage(truth: Truth, one_stage: list[NotingWorker]) -> None:
    assert truth.run(one_stage, Schedule()).largest == len(QUESTIONS)


def test_batched_on_two_stages(truth: Truth, two_stages: list[NotingWorker]) -> None:
    assert truth.run(two_stages, Schedule()).largest >= 2


def test_chunks(truth: Truth, two_stages: list[NotingWorker]) -> None:
    run = truth.run(two_stages, replace(PAGED, max_batch_tokens=11))
    assert max(run.num_pieces(request_id) for request_id in run.answers) >= 3
    assert run.follows


def test_chunks_without_overlap(truth: Truth, two_stages: list[NotingWorker]) -> None:
    run = truth.run(two_stages, replace(PAGED, max_batch_tokens=11, chunk_overlap=False))
    assert max(run.num_pieces(request_id) for request_id in run.answers) >= 3
    assert not run.follows


def test_preempted(truth: Truth, one_stage: list[NotingWorker]) -> None:
    assert truth.run(one_stage, replace(PAGED, num_blocks=FEW_BLOCKS)).num_preempted > 0


def test_shared_prefixes(truth: Truth, two_stages: list[NotingWorker]) -> None:
    run = truth.run(two_stages, replace(PAGED, prefix_cache=True))
    assert sum(answer.cached_tokens >= 20 for answer in run.answers.values()) >= 2


def test_batches_that_stay_together(truth: Truth, one_stage: list[NotingWorker]) -> None:
    run = truth.run(one_stage, replace(PAGED, batching=Batching.REQUEST, max_batch_size=2))
    assert max(run.num_pieces(request_id) for request_id in run.answers) >= 3
