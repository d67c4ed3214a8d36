"""The log of plans: what is complete, what is kept, and the wait for the newest rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orca_dist.core import Plan
from orca_dist.engine import trace
from orca_dist.engine.trace import TraceFlush, TraceLog
from orca_dist.metrics.trace import StageSpan
from orca_dist.proto.v1 import control_pb2 as pb


def send(log: TraceLog, seq: int) -> None:
    log.sent(Plan(seq=seq, ids=[seq, 7], lengths=[3, 1]), control_bytes=20 + seq, now=float(seq))


def rows(*seqs: int, stage: int = 0) -> pb.Trace:
    """Rows of plans whose times and bytes tell stage and plan."""
    columns = [[100 * stage + 10 * seq + column for seq in seqs] for column in range(6)]
    received, ready, start, end, sent, num_bytes = columns
    return pb.Trace(
        seq=seqs,
        received_s=received,
        input_ready_s=ready,
        compute_start_s=start,
        compute_end_s=end,
        sent_s=sent,
        bytes_sent=num_bytes,
    )


def seqs(log: TraceLog) -> list[int]:
    return [plan.seq for plan in log.snapshot()]


def complete(log: TraceLog, seq: int, num_stages: int = 2) -> None:
    send(log, seq)
    log.returned(seq, seq + 0.5)
    for stage in range(num_stages):
        log.add_rows(stage, rows(seq, stage=stage))


def test_a_plan_shows_once_it_has_returned_with_all_rows() -> None:
    log = TraceLog(2)
    send(log, 1)
    log.add_rows(0, rows(1))
    assert seqs(log) == []
    log.returned(1, 1.5)
    assert seqs(log) == []
    log.add_rows(1, rows(1, stage=1))
    assert seqs(log) == [1]


def test_rows_may_come_before_the_return() -> None:
    log = TraceLog(2)
    send(log, 1)
    for stage in range(2):
        log.add_rows(stage, rows(1, stage=stage))
    assert seqs(log) == []
    log.returned(1, 1.5)
    assert seqs(log) == [1]


def test_a_plan_holds_what_was_told() -> None:
    log = TraceLog(2)
    complete(log, 4)
    (plan,) = log.snapshot()
    assert (plan.ids, plan.lengths) == ((4, 7), (3, 1))
    assert (plan.sent_s, plan.returned_s, plan.control_bytes) == (4.0, 4.5, 24)
    assert plan.spans[1] == StageSpan(
        received_s=140.0,
        input_ready_s=141.0,
        compute_start_s=142.0,
        compute_end_s=143.0,
        sent_s=144.0,
        bytes_sent=145,
    )


def test_rows_of_many_plans_come_at_once_oldest_first() -> None:
    log = TraceLog(1)
    for seq in (1, 2, 3):
        send(log, seq)
        log.returned(seq, seq + 0.5)
    log.add_rows(0, rows(3, 1, 2))
    assert seqs(log) == [1, 2, 3]
    assert [plan.spans[0].received_s for plan in log.snapshot()] == [10.0, 20.0, 30.0]


def test_strangers_are_passed_over() -> None:
    """Plans of drops alone, and those long forgotten, leave rows without a plan."""
    log = TraceLog(1)
    send(log, 1)
    log.returned(9, 9.5)
    log.add_rows(0, rows(9, 1))
    log.returned(1, 1.5)
    assert seqs(log) == [1]


def test_columns_of_different_lengths_are_an_error() -> None:
    short = rows(1, 2)
    del short.sent_s[-1]
    with pytest.raises(ValueError, match="zip"):
        TraceLog(1).add_rows(0, short)


def test_the_oldest_plans_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_PLANS", 3)
    log = TraceLog(1)
    for seq in range(5):
        complete(log, seq, num_stages=1)
    assert seqs(log) == [2, 3, 4]


def test_a_snapshot_does_not_grow() -> None:
    log = TraceLog(1)
    complete(log, 1, num_stages=1)
    before = log.snapshot()
    complete(log, 2, num_stages=1)
    assert [plan.seq for plan in before] == [1]


# ---- flush -------------------------------------------------------------


def answers(flush: TraceFlush, pongs: Sequence[tuple[int, int]]) -> list[bool]:
    return [flush.answered(stage, nonce) for stage, nonce in pongs]


def test_a_flush_is_over_when_every_stage_has_answered() -> None:
    flush = TraceFlush(3)
    flush.expect(5)
    assert answers(flush, [(0, 5), (2, 5)]) == [False, False]
    assert not flush.wait(0.0)
    assert answers(flush, [(1, 5)]) == [True]
    assert flush.wait(0.0)


def test_answers_to_earlier_pings_do_not_count() -> None:
    flush = TraceFlush(2)
    flush.expect(5)
    assert answers(flush, [(0, 4), (1, 4), (0, 5), (0, 6)]) == [False] * 4
    assert answers(flush, [(1, 6)]) == [True]


def test_a_flush_that_is_given_up_says_no() -> None:
    flush = TraceFlush(2)
    flush.expect(5)
    flush.answered(0, 5)
    flush.give_up()
    assert not flush.wait(60.0)
