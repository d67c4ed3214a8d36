"""bench chaos notices what it is there to notice: each wrong answer is one, and of its kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orca_dist.bench.chaos import ChaosResult, Limits, Load, run_chaos
from orca_dist.bench.faults import Fault, Round
from orca_dist.bench.jobs import Job
from orca_dist.core import FinishReason, Output, Request
from orca_dist.errors import RequestFailed
from tests.fixtures.shaky_engine import Err, ShakyEngine, right

JOBS = [Job(prompt=(10 * n,), out=3) for n in range(4)]
ROUNDS = [Round(fault=Fault.KILL, stage=0, delay_s=0.05)] * 2


def run(err: Err, *, notice_s: float = 20.0, rounds: list[Round] = ROUNDS) -> ChaosResult:
    engine = ShakyEngine(err)
    try:
        return run_chaos(
            engine,
            JOBS,
            rounds,
            Load(clients=4, rate=200.0, seed=0),
            Limits(notice_s=notice_s, recovery_s=1.0),
        )
    finally:
        engine.close()


def test_all_is_well_with_right_answers() -> None:
    result = run(right)
    assert result.is_clean
    assert result.requests > 2
    assert len(result.rounds) == result.recoveries == 2
    for each in result.rounds:
        assert 0 < each.detection_s <= each.recovery_s <= each.first_token_s


def never(request: Request) -> Iterator[Output]:
    yield right(request)[0]


def with_an_error(request: Request) -> Iterator[Output]:
    yield Output(request.id, reason=FinishReason.ERROR, message="a stage was lost")


def twice_a_token(request: Request) -> Iterator[Output]:
    first, last = right(request)
    yield from (first, first, last)


def after_its_end(request: Request) -> Iterator[Output]:
    yield from (*right(request), right(request)[0])


def another_token(request: Request) -> Iterator[Output]:
    first, last = right(request)
    first.tokens = [first.tokens[0] + 1]
    yield from (first, last)


def too_short(request: Request) -> Iterator[Output]:
    yield Output(request.id, right(request)[0].tokens, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("err", "counts"),
    [
        (never, (1, 0, 0)),
        (with_an_error, (1, 0, 0)),
        (twice_a_token, (0, 1, 0)),
        (after_its_end, (0, 1, 0)),
        (another_token, (0, 0, 1)),
        (too_short, (0, 0, 1)),
    ],
)
def test_one_wrong_answer_is_found(err: Err, counts: tuple[int, int, int]) -> None:
    result = run(err)
    assert (result.lost, result.duplicated, result.differing) == counts
    assert not result.is_clean


def test_a_fault_that_nobody_notices_is_an_error() -> None:
    """Nothing watches for a stopped process here."""
    stopped = [Round(fault=Fault.STOP, stage=0, delay_s=0.0)]
    with pytest.raises(RequestFailed, match="stage 0 met stop, and nothing was noticed for 0 s"):
        run(right, notice_s=0.2, rounds=stopped)
