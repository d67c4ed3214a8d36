"""What an iteration costs the scheduler: select() and on_result(), by how many wait and run.

The real Scheduler over paged memory with one plan in flight; stages take no time.
Both must cost what the batch is large, not what the pool is: nothing walks the
waiting line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orca_dist.core import PagedMemory, Plan, PlanResult, Request, Scheduler, SchedulerConfig

PROMPT_LEN = 64
BLOCK_SIZE = 16
WARM_UP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCost:
    """Medians over the iterations of a batch that decodes, in microseconds."""

    waiting: int
    running: int
    us_per_iteration: float
    select_us: float
    on_result_us: float


def measure(sizes: Sequence[tuple[int, int]], *, iterations: int) -> list[SchedulerCost]:
    """One row for each (waiting, running); sizes take turns, so that noise meets all alike."""
    turns = [_Turns(waiting, running, iterations) for waiting, running in sizes]
    for _ in range(iterations + WARM_UP):
        for turn in turns:
            turn.take()
    return [turn.cost() for turn in turns]


class _Turns:
    """A scheduler with `running` requests that decode and `waiting` behind them."""

    def __init__(self, waiting: int, running: int, iterations: int) -> None:
        max_tokens = iterations + WARM_UP + 2
        blocks = running * (-(-(PROMPT_LEN + max_tokens) // BLOCK_SIZE) + 1)
        self._waiting, self._running = waiting, running
        self._times: list[tuple[float, float]] = []
        self._scheduler = Scheduler(
            config=SchedulerConfig(
                inflight=1, max_batch_size=running, max_batch_tokens=running * PROMPT_LEN
            ),
            memory=PagedMemory(num_blocks=blocks, block_size=BLOCK_SIZE),
        )
        for id in range(running + waiting):
            prompt = (id, *range(PROMPT_LEN - 1))
            self._scheduler.submit(Request(id=id, prompt=prompt, max_tokens=max_tokens), 0.0)

    def take(self) -> None:
        """One iteration."""
        start = time.perf_counter()
        plan = self._scheduler.select(0.0)
        selected = time.perf_counter()
        assert plan is not None
        assert len(plan.ids) == self._running
        result = _result(plan)
        returned = time.perf_counter()
        self._scheduler.on_result(result, 0.0)
        end = time.perf_counter()
        self._times.append((selected - start, end - returned))

    def cost(self) -> SchedulerCost:
        times = self._times[WARM_UP:]
        return SchedulerCost(
            waiting=self._waiting,
            running=self._running,
            us_per_iteration=_median_us([select + result for select, result in times]),
            select_us=_median_us([select for select, _ in times]),
            on_result_us=_median_us([result for _, result in times]),
        )


def _result(plan: Plan) -> PlanResult:
    """A token for each that samples, which ends none."""
    return PlanResult(seq=plan.seq, ids=list(plan.ids), tokens=[[1] for _ in plan.ids])


def _median_us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)
