"""Deadlines and priorities, through gRPC: who is late leaves at once, who is urgent goes first.

The model's answers are known, stages are slow, and memory has room for one long
request: others wait until it is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orca_dist import SamplingParams
from orca_dist.core import FinishReason
from orca_dist.errors import DeadlineExceeded
from tests.fixtures.checkpoints import letter, script_llama
from tests.fixtures.live import live, local_config, slow_placement
from tests.fixtures.served import Served, served

A, CYCLE = letter("A"), 26
KV_TOKENS = 208
LONG = SamplingParams(max_tokens=200)
TIMEOUT_S = 0.5  # a token takes 40 ms at least, LONG 8 s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script_llama(
        tmp_path_factory.mktemp("script"), next_of=lambda token: A + (token - A + 1) % CYCLE
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    config = local_config(2, kv_tokens=KV_TOKENS, memory="reserve")
    with served(folder, config, placement=slow_placement()) as server:
        yield server


def test_a_late_answer_ends(server: Served) -> None:
    """DEADLINE_EXCEEDED; its memory is back, and no plan selected since has it."""
    with server.client() as client:
        before = len(server.plans())
        with pytest.raises(DeadlineExceeded):
            client.generate([A], LONG, timeout_s=TIMEOUT_S)
        _await_load(server, live=0)
        gone_s = time.time()
        assert server.engine.load().used_slots == 0
        _answered(server, num_tokens=3)
    plans = server.plans()[before:]
    late = min(id for plan in plans for id in plan.ids)
    of_late = [plan for plan in plans if late in plan.ids]
    assert 0 < len(of_late) < 200
    assert len(plans) == len(of_late) + 3
    assert all(plan.sent_s < gone_s for plan in of_late)


def test_late_in_the_queue(server: Served) -> None:
    """It ends where it waits, in no plan, while the one before it runs on."""
    with server.client() as client:
        first = client.stream([A], LONG)
        next(first)
        before = len(server.plans())
        with pytest.raises(DeadlineExceeded):
            client.generate([A], LONG, timeout_s=TIMEOUT_S)
        _await_load(server, live=1)
        assert server.engine.load().waiting_requests == 0
        next(first)
        assert len({id for plan in server.plans()[before:] for id in plan.ids}) == 1
        first.close()
    _await_load(server, live=0)


def test_the_engine_keeps_the_deadline_by_itself(folder: Path) -> None:
    """Nobody hangs up here: the tokens so far, then the news; others don't notice."""
    with live(folder, local_config(2), placement=slow_placement()) as front:
        late = front.submit([A], 200, deadline_s=time.monotonic() + TIMEOUT_S)
        other = front.submit([A + 1], 30)
        (answer,) = front.wait([late])
        told_s = time.time()
        front.wait([other])
        plans = front.trace()
    assert answer.reason is FinishReason.DEADLINE
    assert answer.message == f"the deadline passed after {len(answer.tokens)} tokens"
    assert 0 < len(answer.tokens) < 200
    assert front.answers[other].tokens == [A + (2 + i) % CYCLE for i in range(30)]
    assert any(plan.sent_s > told_s for plan in plans), "the other went on after it"
    assert not any(late in plan.ids for plan in plans if plan.sent_s > told_s)


def test_the_engine_keeps_the_deadline_of_one_that_waits(folder: Path) -> None:
    config = local_config(2, kv_tokens=KV_TOKENS, memory="reserve")
    with live(folder, config, placement=slow_placement()) as front:
        first = front.submit([A], 200)
        late = front.submit([A], 200, deadline_s=time.monotonic() + TIMEOUT_S)
        (answer,) = front.wait([late])
        num_tokens = len(front.answers[first].tokens)
        front.wait([first], num_tokens=num_tokens + 2)
        front.cancel(first)
        ids = {id for plan in front.trace() for id in plan.ids}
    assert (answer.reason, answer.tokens) == (FinishReason.DEADLINE, [])
    assert answer.message == "the deadline passed after 0 tokens"
    assert ids == {first}


def test_urgent_ones_pass_others_in_the_queue(server: Served) -> None:
    """One runs; two wait, then a third of higher priority and a fourth of lower."""
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        first = client.stream([A], LONG)
        next(first)
        before = len(server.plans())
        jobs = []
        for num_waiting, priority in enumerate([0, 0, 5, -1], 1):
            params = SamplingParams(max_tokens=3)
            jobs.append(pool.submit(client.generate, [A], params, priority=priority))
            _await_load(server, live=1 + num_waiting)
        assert server.engine.load().waiting_requests == 4
        first.close()
        assert [job.result(30).token_ids for job in jobs] == [(A + 1, A + 2, A + 3)] * 4
    order = list(dict.fromkeys(id for plan in server.plans()[before:] for id in plan.ids))
    running, waited = order[0], order[1:]
    assert waited == [running + arrival for arrival in (3, 1, 2, 4)]


def _answered(server: Served, num_tokens: int) -> None:
    with server.client() as client:
        answer = client.generate([A], SamplingParams(max_tokens=num_tokens))
    assert len(answer.token_ids) == num_tokens


def _await_load(server: Served, *, live: int) -> None:
    """Until so many requests are live: the front tells the master a moment after the client."""
    deadline = time.monotonic() + 20
    while server.engine.load().live_requests != live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.engine.load().live_requests == live
