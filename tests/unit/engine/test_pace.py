"""When a request that finds the queue full is told to come again."""

from __future__ import annotations

import pytest

from orca_dist.core import Output
from orca_dist.engine.pace import MAX_S, MIN_KNOWN, MIN_S, NUM_LAST, QueuePace
from orca_dist.errors import QueueFull
from tests.fixtures.noting_master import NotingMaster, make_streams, on_loop, open_one


def paced(num: int, *, every_s: float, start_s: float = 1000.0) -> tuple[QueuePace, float]:
    """A queue that `num` requests have left, and the time at which the last one did."""
    pace = QueuePace()
    for number in range(num):
        pace.left(start_s + number * every_s)
    return pace, start_s + (num - 1) * every_s


def test_too_few_say_nothing() -> None:
    pace, now_s = paced(MIN_KNOWN - 1, every_s=100.0)
    assert pace.room_in_s(1000, now_s) == MIN_S


def test_half_of_those_waiting_have_begun_by_then() -> None:
    pace, now_s = paced(NUM_LAST * 3, every_s=0.5)
    assert pace.room_in_s(40, now_s) == pytest.approx(20 * 0.5, rel=0.02)
    assert pace.room_in_s(80, now_s) == pytest.approx(2 * pace.room_in_s(40, now_s))


def test_it_is_never_at_once_and_never_for_ever() -> None:
    fast, slow = paced(NUM_LAST, every_s=0.001), paced(NUM_LAST, every_s=100.0)
    assert fast[0].room_in_s(10, fast[1]) == MIN_S
    assert slow[0].room_in_s(10, slow[1]) == MAX_S


def test_a_queue_that_stands_still_is_slower() -> None:
    pace, now_s = paced(NUM_LAST, every_s=0.1)
    assert pace.room_in_s(100, now_s + 10.0) > 2 * pace.room_in_s(100, now_s)


def test_only_the_last_ones_count() -> None:
    pace, now_s = paced(NUM_LAST, every_s=100.0)
    for number in range(NUM_LAST):
        pace.left(now_s + number * 0.1)
    assert pace.room_in_s(100, now_s + NUM_LAST * 0.1) == pytest.approx(100 / 2 * 0.1, rel=0.02)


@on_loop
async def test_a_full_queue_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("orca_dist.engine.streams.time.monotonic", lambda: now_s)
    streams = make_streams(NotingMaster())
    for _ in range(16):
        stream = open_one(streams)
        streams.deliver([Output(id=stream.key, tokens=(1,))])
        now_s += 2.0
    for _ in range(3):
        open_one(streams)
    with pytest.raises(QueueFull) as raised:
        open_one(streams)
    assert raised.value.retry_after_s == pytest.approx(3 / 2 * 2.0)
