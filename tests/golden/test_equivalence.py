"""Scheduling changes no token and no bit: whatever the schedule, each request is as if alone.

Batched, in pieces, preempted, on shared KV, on 1, 2, 3 and 5 stages, against the
request alone, whole, with reserved memory, on one stage. Every test also shows
that what it is about did happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orca_dist.core import Batching, Forming, MemoryKind, Request, Sampling
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.equivalence import Reference, Run, noting_stages
from tests.fixtures.noting_stage import NotingWorker
from tests.fixtures.thread_pipeline import BLOCK_SIZE, Arrivals, Schedule

GREEDY = Sampling()
LENGTHS = [1, 2, 16, 17, 63, 100]
PREFIX = tuple(range(200, 250))
TAILS = [1, 2, 2, 7, 14, 50]  # those of 52 tokens are twins of whole blocks, and other seeds
SHARING = range(2 * len(LENGTHS) + 1, 2 * len(LENGTHS) + len(TAILS) + 1)  # ids
SECOND_TURN = 100  # its id is the first turn's and this
FEW_BLOCKS = 32  # the longest request takes 28
PAGED = Schedule(memory=MemoryKind.PAGED, num_blocks=1024)
SHARED = replace(PAGED, prefix_cache=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The model's reference, and the requests that are in it."""

    reference: Reference
    stages: Sequence[NotingWorker]
    turns: Sequence[Arrivals]

    def run(self, schedule: Schedule, turns: Sequence[Arrivals] | None = None) -> Run:
        return self.reference.check(self.stages, schedule, turns or self.turns)

    def short_ones(self, most: int) -> list[Arrivals]:
        """The first turn's requests of at most so many prompt tokens, all at once."""
        requests = [request for batch in self.turns[0].values() for request in batch]
        return [{0: [request for request in requests if len(request.prompt) <= most]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def truth(folder: Path) -> tuple[Reference, list[Arrivals]]:
    reference, first = Reference.load(folder), _requests()
    reference.add(first)
    second = _second_turns(reference, first)
    reference.add(second)
    return reference, [_staggered(first), _staggered(second)]


@pytest.fixture(
    scope="module",
    params=[2, *(pytest.param(num, marks=pytest.mark.slow) for num in (1, 3, 5))],
)
def checks(
    folder: Path, truth: tuple[Reference, list[Arrivals]], request: pytest.FixtureRequest
) -> Checks:
    reference, turns = truth
    return Checks(reference=reference, stages=noting_stages(folder, request.param), turns=turns)


def _requests() -> list[Request]:
    """Greedy ones with logits, seeded ones with and without, and some that look alike."""
    lengths = [*LENGTHS, *reversed(LENGTHS)]
    prompts = [tuple((7 * i + 11 * k) % 320 for k in range(n)) for i, n in enumerate(lengths)]
    prompts += [(*PREFIX, *range(n)) for n in TAILS]
    prompts += [(first,) * BLOCK_SIZE + PREFIX for first in (8, 9)]  # nothing to share
    return [
        Request(id=i, prompt=prompt, max_tokens=4 + i % 7, sampling=_sampling(i))
        for i, prompt in enumerate(prompts, 1)
    ]


def _sampling(request_id: int) -> Sampling:
    if request_id <= len(LENGTHS):
        return Sampling(return_logits=True)
    if request_id >= SHARING.start and request_id % 3 == 0:
        return GREEDY
    logits = request_id < SHARING.start and request_id % 2 == 0
    return Sampling(temperature=1.0, seed=request_id, return_logits=logits)


def _second_turns(reference: Reference, requests: Sequence[Request]) -> list[Request]:
    """Prompt, answer and a little more, of those whose KV may be shared."""
    return [
        replace(
            request,
            id=SECOND_TURN + request.id,
            prompt=(*request.prompt, *reference.answers[request.id].tokens, 5, 6, 7),
        )
        for request in requests
        if not request.sampling.return_logits and len(request.prompt) < 100
    ]


def _staggered(requests: Sequence[Request]) -> Arrivals:
    """A few at once and, while they run, the others, of all lengths each time."""
    return {0: requests[::4], 1: requests[1::4], 2: requests[2::4], 4: requests[3::4]}


# ---- batches -----------------------------------------------------------


def test_batched(checks: Checks) -> None:
    run = checks.run(Schedule(max_batch_size=32, num_blocks=1024))
    assert run.largest >= 12
    assert any(min(plan.lengths) == 1 < max(plan.lengths) for plan in run.plans)


def test_balanced_batches(checks: Checks) -> None:
    assert checks.run(replace(PAGED, forming=Forming.BALANCED)).largest >= 2


@pytest.mark.parametrize("batching", [Batching.REQUEST, Batching.DYNAMIC])
def test_batches_that_stay_together(checks: Checks, batching: Batching) -> None:
    """The shortest prompt's length is taken first, the rest of the others token by token."""
    schedule = replace(PAGED, batching=batching, batch_window_s=1.0, max_batch_size=6)
    run = checks.run(schedule, checks.short_ones(most=52))
    assert run.largest == 6
    assert max(run.num_pieces(request_id) for request_id in run.answers) > 10


# ---- memory ------------------------------------------------------------


def test_paged_memory(checks: Checks) -> None:
    run = checks.run(PAGED)
    assert any(plan.new_blocks for plan in run.plans), "blocks came on demand"
    assert run.num_preempted == 0
    assert not any(answer.cached_tokens for answer in run.answers.values())


def test_preempted(checks: Checks) -> None:
    run = checks.run(replace(PAGED, num_blocks=FEW_BLOCKS))
    assert run.num_preempted >= 3


def test_preempted_in_the_middle_of_a_prompt(checks: Checks) -> None:
    run = checks.run(replace(SHARED, num_blocks=FEW_BLOCKS, max_batch_tokens=9))
    assert run.num_preempted >= 3
    assert max(run.num_pieces(request_id) for request_id in run.answers) >= 100 // 9


def test_shared_prefixes(checks: Checks) -> None:
    """Among requests that run together, and of a first turn's prompt and answer in a second."""
    run = checks.run(SHARED)
    cached = {request_id: answer.cached_tokens for request_id, answer in run.answers.items()}
    whole_blocks = len(PREFIX) // BLOCK_SIZE * BLOCK_SIZE
    assert sum(cached[request_id] >= whole_blocks for request_id in SHARING) >= 4
    for batch in checks.turns[1].values():
        for request in batch:
            assert cached[request.id] in (len(request.prompt) - 4 - n for n in range(BLOCK_SIZE))
    assert not any(cached[i] for i in range(1, len(LENGTHS) + 1)), "all logits are asked for"


def test_shared_prefixes_in_little_memory(checks: Checks) -> None:
    """Cached blocks are given away again, and those of whoever is preempted are found again."""
    run = checks.run(replace(SHARED, num_blocks=FEW_BLOCKS))
    assert run.num_preempted >= 3
    assert sum(answer.cached_tokens for answer in run.answers.values()) > 0


# ---- pieces of prompts -------------------------------------------------


@pytest.mark.parametrize("size", [7, 16, 33])
def test_chunks(checks: Checks, size: int) -> None:
    run = checks.run(replace(PAGED, max_batch_tokens=size))
    assert max(sum(plan.lengths) for plan in run.plans) == size
    assert max(run.num_pieces(request_id) for request_id in run.answers) >= 100 // size
    assert run.follows


def test_chunks_of_one_token(checks: Checks) -> None:
    run = checks.run(replace(PAGED, max_batch_tokens=1), checks.short_ones(most=17))
    assert {sum(plan.lengths) for plan in run.plans} == {1}


def test_chunks_of_balanced_batches(checks: Checks) -> None:
    """They are as long as what waits asks for; a pipeline of one takes all of it."""
    run = checks.run(replace(SHARED, forming=Forming.BALANCED, min_chunk=5))
    in_pieces = any(run.num_pieces(request_id) for request_id in run.answers)
    assert in_pieces == (len(checks.stages) > 1)


def test_chunks_without_overlap(checks: Checks) -> None:
    run = checks.run(replace(PAGED, max_batch_tokens=16, chunk_overlap=False))
    assert max(run.num_pieces(request_id) for request_id in run.answers) >= 100 // 16
    assert run.follows == (len(checks.stages) == 1)


def test_whole_prompts(checks: Checks) -> None:
    run = checks.run(replace(PAGED, max_batch_tokens=48, chunked_prefill=False))
    assert not any(run.num_pieces(request_id) for request_id in run.answers)
    assert run.largest > 1
