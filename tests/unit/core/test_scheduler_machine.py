"""Any events in any order, looking for a promise that the Scheduler breaks.

Hypothesis finds short ways to break one; long seeded runs reach the deep states
that it rarely does. The promises themselves are the harness's.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from orca_dist.core import Forming, SchedulerConfig
from tests.fixtures.scheduler_harness import PLAIN, VOCAB, SchedulerHarness, random_answers

BATCH_SIZES = [1, 2, 3, 4, 8]
BATCH_TOKENS = [1, 5, 9, 12, 16, 24, 48]
MIN_CHUNKS = [1, 2, 5, 8, 16]
NUM_BLOCKS = [1, 5, 12, 20, 30, 48, 80, 120]

PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
ARRIVALS = st.tuples(PROMPTS, st.integers(1, 8), st.frozensets(st.integers(0, 1)))
PICKS = st.one_of(st.integers(0, 5), st.integers(0, 999))
SEEDS = st.integers(0, 999).map(random.Random)


def finish_the_day(harness: SchedulerHarness, rng: random.Random) -> None:
    """All live requests end, nothing is left behind, and the whole pool can be had again."""
    harness.drain(rng)
    harness.flush_drops()
    harness.check_empty()
    if harness.memory.capacity >= 2:
        harness.submit([PLAIN] * (harness.memory.capacity - 1), 1, frozenset())
    harness.drain(rng)
    harness.flush_drops()
    harness.check_empty()


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are the harness's events; answers of the last stage come from a drawn seed."""

    @initialize(
        forming=st.sampled_from(Forming),
        inflight=st.integers(1, 4),
        max_batch_size=st.sampled_from(BATCH_SIZES),
        max_batch_tokens=st.sampled_from(BATCH_TOKENS),
        min_chunk=st.sampled_from(MIN_CHUNKS),
        num_blocks=st.sampled_from(NUM_BLOCKS),
        block_size=st.integers(1, 3),
        rng=SEEDS,
    )
    def start(
        self,
        forming: Forming,
        inflight: int,
        max_batch_size: int,
        max_batch_tokens: int,
        min_chunk: int,
        num_blocks: int,
        block_size: int,
        rng: random.Random,
    ) -> None:
        config = SchedulerConfig(
            inflight=inflight,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            forming=forming,
            min_chunk=min_chunk,
        )
        self.rng = rng
        self.harness = SchedulerHarness(config=config, num_blocks=num_blocks, block_size=block_size)

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
    def submit(self, arrivals: list[tuple[list[int], int, frozenset[int]]]) -> None:
        for prompt, max_tokens, stop_ids in arrivals:
            self.harness.submit(prompt, max_tokens, stop_ids)

    @precondition(lambda self: self.harness.live)
    @rule(times=st.integers(1, 4))
    def select(self, times: int) -> None:
        for _ in range(times):
            self.harness.select()

    @precondition(lambda self: self.harness.flight)
    @rule(rng=SEEDS, times=st.integers(1, 4))
    def return_oldest(self, rng: random.Random, times: int) -> None:
        for plan in self.harness.flight[:times]:
            self.harness.return_oldest(random_answers(plan, rng))

    @precondition(lambda self: self.harness.live)
    @rule(rng=SEEDS, times=st.integers(1, 6))
    def turn_around(self, rng: random.Random, times: int) -> None:
        """What the engine master does: fill the pipeline, take a result, fill it again."""
        for _ in range(times):
            while self.harness.select():
                pass
            if self.harness.flight:
                self.harness.return_oldest(random_answers(self.harness.flight[0], rng))

    @precondition(lambda self: self.harness.num_submitted)
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        self.harness.cancel(self.harness.any_id(pick))

    @precondition(lambda self: self.harness.num_submitted)
    @rule(pick=PICKS, num_tokens=st.integers(0, 4))
    def finish(self, pick: int, num_tokens: int) -> None:
        self.harness.finish(self.harness.any_id(pick), num_tokens)

    @precondition(lambda self: self.harness.returned)
    @rule(pick=PICKS)
    def return_late(self, pick: int) -> None:
        self.harness.return_late(self.harness.returned[pick % len(self.harness.returned)])

    @precondition(lambda self: self.harness.stage.known)
    @rule(lost=st.sampled_from([True, False, False, False]))
    def idle_or_lose_the_pipeline(self, lost: bool) -> None:
        if lost:
            self.harness.restart()
        else:
            self.harness.flush_drops()

    @invariant()
    def promises_hold(self) -> None:
        self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            finish_the_day(self.harness, self.rng)


def test_machine() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---- long runs -------------------------------------------------------------------------


WEIGHTS = {
    "submit": 12,
    "select": 40,
    "return": 35,
    "cancel": 4,
    "finish": 4,
    "flush": 2,
    "return late": 2,
    "restart": 0.5,
}


def random_harness(rng: random.Random, forming: Forming) -> SchedulerHarness:
    config = SchedulerConfig(
        inflight=rng.randint(1, 4),
        max_batch_size=rng.choice(BATCH_SIZES),
        max_batch_tokens=rng.choice(BATCH_TOKENS),
        forming=forming,
        min_chunk=rng.choice(MIN_CHUNKS),
    )
    return SchedulerHarness(
        config=config, num_blocks=rng.choice(NUM_BLOCKS), block_size=rng.randint(1, 3)
    )


def submit_some(harness: SchedulerHarness, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        prompt = rng.choices(range(VOCAB), k=rng.randint(1, 12))
        stop_ids = frozenset(rng.sample([0, 1], rng.randint(0, 2)))
        harness.submit(prompt, rng.randint(1, 8), stop_ids)


def random_event(harness: SchedulerHarness, rng: random.Random) -> None:
    """Weights as in a busy server; losing the pipeline is rare."""
    request_id = harness.any_id(rng.choice([rng.randint(0, 5), rng.randint(0, 999)]))
    match rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "submit":
            submit_some(harness, rng)
        case "select":
            harness.select()
        case "return" if harness.flight:
            harness.return_oldest(random_answers(harness.flight[0], rng))
        case "cancel":
            harness.cancel(request_id)
        case "finish":
            harness.finish(request_id, rng.randint(0, 4))
        case "flush":
            harness.flush_drops()
        case "return late" if harness.returned:
            harness.return_late(rng.choice(harness.returned))
        case "restart":
            harness.restart()


@pytest.mark.parametrize("forming", Forming)
@pytest.mark.parametrize("seed", range(50))
def test_long_run(seed: int, forming: Forming) -> None:
    rng = random.Random(seed)
    harness = random_harness(rng, forming)
    for _ in range(300):
        random_event(harness, rng)
        harness.check()
    finish_the_day(harness, rng)
