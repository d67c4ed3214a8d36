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

from orca_dist.core import Batching, Forming, MemoryKind, SchedulerConfig
from tests.fixtures.last_stage import PLAIN, VOCAB, random_answers
from tests.fixtures.scheduler_harness import SchedulerHarness

BATCH_SIZES = [1, 2, 3, 4, 8]
BATCH_TOKENS = [1, 5, 9, 12, 16, 24, 48]
MIN_CHUNKS = [1, 2, 5, 8, 16]
NUM_BLOCKS = [1, 5, 12, 20, 30, 48, 80, 120]

TIMEOUTS = [None, None, None, 0.0, 1.0, 5.0, 40.0]
RATIOS = [0.0, 0.0, 0.5, 1.2]

PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
ARRIVALS = st.tuples(
    PROMPTS,
    st.integers(1, 8),
    st.frozensets(st.integers(0, 1)),
    st.sampled_from([0, 0, 0, 1, -1, 5]),
    st.sampled_from(TIMEOUTS),
)
CONFIGS = st.builds(
    SchedulerConfig,
    inflight=st.integers(1, 4),
    max_batch_size=st.sampled_from(BATCH_SIZES),
    max_batch_tokens=st.sampled_from(BATCH_TOKENS),
    batching=st.sampled_from([Batching.ITERATION, *Batching]),
    forming=st.sampled_from(Forming),
    min_chunk=st.sampled_from(MIN_CHUNKS),
    chunked_prefill=st.booleans(),
    chunk_overlap=st.booleans(),
    micro_batch_size=st.sampled_from([None, 1, 2]),
    batch_window_s=st.sampled_from([0.0, 2.0, 10.0]),
    waiting_served_ratio=st.sampled_from(RATIOS),
    max_waiting_iterations=st.integers(0, 8),
    ageing_s=st.sampled_from([0.5, 4.0]),
)
PICKS = st.one_of(st.integers(0, 5), st.integers(0, 999))
SEEDS = st.integers(0, 999).map(random.Random)


def finish_the_day(harness: SchedulerHarness, rng: random.Random) -> None:
    """All live requests end, nothing is left behind, and the whole pool can be had again."""
    harness.drain(rng)
    harness.flush_drops()
    harness.check_empty()
    if harness.model.memory.capacity >= 2:
        harness.submit([PLAIN] * (harness.model.memory.capacity - 1), 1, frozenset())
    harness.drain(rng)
    harness.flush_drops()
    harness.check_empty()


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are the harness's events; answers of the last stage come from a drawn seed."""

    @initialize(
        config=CONFIGS,
        memory=st.sampled_from(MemoryKind),
        num_blocks=st.sampled_from(NUM_BLOCKS),
        block_size=st.integers(1, 3),
        rng=SEEDS,
    )
    def start(
        self,
        config: SchedulerConfig,
        memory: MemoryKind,
        num_blocks: int,
        block_size: int,
        rng: random.Random,
    ) -> None:
        self.rng = rng
        self.harness = SchedulerHarness(
            config=config, memory=memory, num_blocks=num_blocks, block_size=block_size
        )

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
    def submit(
        self, arrivals: list[tuple[list[int], int, frozenset[int], int, float | None]]
    ) -> None:
        for arrival in arrivals:
            self.harness.submit(*arrival)

    @precondition(lambda self: self.harness.model.live)
    @rule(times=st.integers(1, 4))
    def select(self, times: int) -> None:
        for _ in range(times):
            self.harness.select()

    @precondition(lambda self: self.harness.model.flight)
    @rule(rng=SEEDS, times=st.integers(1, 4))
    def return_oldest(self, rng: random.Random, times: int) -> None:
        for plan in self.harness.model.flight[:times]:
            self.harness.return_oldest(random_answers(plan, rng))

    @precondition(lambda self: self.harness.model.live)
    @rule(rng=SEEDS, times=st.integers(1, 6))
    def turn_around(self, rng: random.Random, times: int) -> None:
        """What the engine master does: fill the pipeline, take a result, fill it again."""
        for _ in range(times):
            while self.harness.select():
                pass
            if self.harness.model.flight:
                self.harness.return_oldest(random_answers(self.harness.model.flight[0], rng))

    @precondition(lambda self: self.harness.model.num_submitted)
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        self.harness.cancel(self.harness.model.any_id(pick))

    @precondition(lambda self: self.harness.model.num_submitted)
    @rule(pick=PICKS, num_tokens=st.integers(0, 4))
    def finish(self, pick: int, num_tokens: int) -> None:
        self.harness.finish(self.harness.model.any_id(pick), num_tokens)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.harness.pass_time(seconds)

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


def explore(max_examples: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_machine() -> None:
    explore(40)


@pytest.mark.slow
def test_machine_for_longer() -> None:
    explore(300)


# ---- long runs -------------------------------------------------------------------------


WEIGHTS = {
    "submit": 12,
    "select": 40,
    "return": 35,
    "cancel": 4,
    "finish": 4,
    "flush": 2,
    "pass time": 4,
    "return late": 2,
    "restart": 0.5,
}


def random_harness(
    rng: random.Random, batching: Batching, memory: MemoryKind, forming: Forming
) -> SchedulerHarness:
    config = SchedulerConfig(
        inflight=rng.randint(1, 4),
        max_batch_size=rng.choice(BATCH_SIZES),
        max_batch_tokens=rng.choice(BATCH_TOKENS),
        batching=batching,
        forming=forming,
        min_chunk=rng.choice(MIN_CHUNKS),
        chunked_prefill=rng.random() < 0.6,
        chunk_overlap=rng.random() < 0.6,
        micro_batch_size=rng.choice([None, None, 1, 2]),
        batch_window_s=rng.choice([0.0, 2.0, 10.0]),
        waiting_served_ratio=rng.choice(RATIOS),
        max_waiting_iterations=rng.randint(0, 8),
        ageing_s=rng.choice([0.5, 4.0]),
    )
    return SchedulerHarness(
        config=config,
        memory=memory,
        num_blocks=rng.choice(NUM_BLOCKS),
        block_size=rng.randint(1, 3),
    )


def submit_some(harness: SchedulerHarness, rng: random.Random) -> None:
    """Prompts often begin alike, as chats do."""
    common = rng.choices(range(VOCAB), k=6) if rng.random() < 0.2 else [1, 2, 3, 1, 2, 3]
    for _ in range(rng.randint(1, 4)):
        prompt = common[: rng.randint(0, 6)] + rng.choices(range(VOCAB), k=rng.randint(1, 6))
        stop_ids = frozenset(rng.sample([0, 1], rng.randint(0, 2)))
        priority = rng.choice([0, 0, 0, 0, 1, -1, 5])
        harness.submit(prompt, rng.randint(1, 8), stop_ids, priority, rng.choice(TIMEOUTS))


def random_event(harness: SchedulerHarness, rng: random.Random) -> None:
    """Weights as in a busy server; losing the pipeline is rare."""
    request_id = harness.model.any_id(rng.choice([rng.randint(0, 5), rng.randint(0, 999)]))
    match rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "submit":
            submit_some(harness, rng)
        case "select":
            harness.select()
        case "return" if harness.model.flight:
            harness.return_oldest(random_answers(harness.model.flight[0], rng))
        case "cancel":
            harness.cancel(request_id)
        case "finish":
            harness.finish(request_id, rng.randint(0, 4))
        case "flush":
            harness.flush_drops()
        case "pass time":
            harness.pass_time(rng.choice([0.0, 0.5, 3.0]))
        case "return late" if harness.returned:
            harness.return_late(rng.choice(harness.returned))
        case "restart":
            harness.restart()


@pytest.mark.parametrize("forming", Forming)
@pytest.mark.parametrize("memory", MemoryKind)
@pytest.mark.parametrize("batching", Batching)
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 18))]
)
def test_long_run(seed: int, batching: Batching, memory: MemoryKind, forming: Forming) -> None:
    rng = random.Random(seed)
    harness = random_harness(rng, batching, memory, forming)
    for _ in range(300):
        random_event(harness, rng)
        harness.check()
    finish_the_day(harness, rng)
