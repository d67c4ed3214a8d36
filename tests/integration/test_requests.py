"""Requests through the whole of it: gRPC client, server, master, three local stages.

A script model whose output is fully known, so that an answer's every token can
be told right from wrong, and the pool room for two requests of 200 tokens: more
of them wait where memory is reserved, and are preempted where it is paged.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from orca_dist import Client, SamplingParams
from orca_dist.client.results import Chunk
from orca_dist.core import FinishReason
from orca_dist.errors import DuplicateRequest
from tests.fixtures.checkpoints import script_llama
from tests.fixtures.live import local_config
from tests.fixtures.served import Served, served

FIRST_ID, CYCLE = 263, 26  # A..Z of the byte tokenizer: A goes on with B, Z with A
KV_TOKENS = 416  # two requests of 200 tokens, in blocks of 16
LONG = SamplingParams(max_tokens=190)


@pytest.fixture(scope="module", params=[pytest.param("reserve", marks=pytest.mark.slow), "paged"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("script")
    script_llama(folder, next_of=_next)
    config = local_config(3, kv_tokens=KV_TOKENS, memory=request.param)
    with served(folder, config) as server:
        yield server


def _next(token: int) -> int:
    return FIRST_ID + (token - FIRST_ID + 1) % CYCLE


def _letters(first: int, count: int) -> tuple[int, ...]:
    return tuple(FIRST_ID + (first + 1 + i) % CYCLE for i in range(count))


def _prompt(letter: int) -> list[int]:
    return [FIRST_ID + letter]


def test_cancelled_in_the_middle(server: Served) -> None:
    """A4: room for two; the third has it when the first is cancelled, the second goes on."""
    with server.client() as client, ThreadPoolExecutor(2) as pool:
        first = client.stream(_prompt(0), LONG, request_id="r1")
        _take(first, 5)
        second = pool.submit(client.generate, _prompt(3), LONG)
        third = pool.submit(client.generate, _prompt(7), SamplingParams(max_tokens=20))
        first.close()
        assert third.result(60).token_ids == _letters(7, 20)
        assert second.result(60).token_ids == _letters(3, 190)
        _drained(server)


def test_fifty_cancels_leave_nothing(server: Served) -> None:
    """A4 again and again: each time the room of the cancelled one is there for the next."""
    with server.client() as client:
        for _ in range(50):
            streams = [client.stream(_prompt(i), LONG) for i in range(2)]
            for stream in streams:
                _take(stream, 3)
                stream.close()
            answer = client.generate(_prompt(7), SamplingParams(max_tokens=3))
            assert answer.token_ids == _letters(7, 3)
    _drained(server)


def test_a_stop_string_ends_an_answer_and_frees_its_room(server: Served) -> None:
    """F31: streamed and unary say the same, and no token after the stop is counted."""
    params = SamplingParams(max_tokens=190, stop=("MN",))
    with server.client() as client:
        chunks = list(client.stream(_prompt(0), params))
        whole = client.generate(_prompt(0), params)
        included = client.generate(_prompt(0), replace(params, include_stop=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text == "BCDEFGHIJKL"
    assert included.text == "BCDEFGHIJKLMN"
    assert whole.token_ids == included.token_ids == _letters(0, 13)
    assert (whole.finish_reason, whole.usage.completion_tokens) == (FinishReason.STOP, 13)
    _drained(server)
    assert server.engine.load().used_slots == 0


def _take(stream: Iterator[Chunk], count: int) -> list[Chunk]:
    return [next(stream) for _ in range(count)]


def _drained(server: Served) -> None:
    """No request is live and no slot in use, as soon as the server has heard of the last end."""
    deadline = time.monotonic() + 20
    while (load := server.engine.load()).live_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (load.live_requests, load.used_slots, load.waiting_requests) == (0, 0, 0)


def test_in_no_plan_after_the_cancel(server: Served) -> None:
    with server.client() as client:
        stream = client.stream(_prompt(0), LONG)
        for _ in range(5):
            next(stream)
        stream.close()
        _drained(server)
        client.generate(_prompt(2), SamplingParams(max_tokens=1))  # behind all that was under way
        plans = server.plans()
        before = {i for plan in plans for i in plan.ids}
        client.generate(_prompt(1), SamplingParams(max_tokens=30))
        later = {i for plan in server.plans()[len(plans) :] for i in plan.ids}
        assert len(later) == 1
        assert not later & before


def test_unary_deadline_ends_the_request(server: Served) -> None:
    """D18: a unary call whose client left doesn't run on to max_tokens."""
    with server.client() as client:
        seen = len(server.plans())
        with pytest.raises(Exception, match=r"(?i)deadline|timed out|timeout"):
            client.generate(_prompt(0), SamplingParams(max_tokens=250), timeout_s=0.05)
        _drained(server)
        assert 0 < len(server.plans()[seen:]) < 250


def test_sixteen_at_once_keep_their_answers(server: Served) -> None:
    """D25: twenty rounds of sixteen, a third of them cancelled; each answer is its own."""
    rng = random.Random(25)
    with server.client() as client, ThreadPoolExecutor(16) as pool:
        for _ in range(20):
            cancelled = {i for i in range(16) if rng.random() < 0.3}
            jobs = [pool.submit(_one, client, i, i in cancelled) for i in range(16)]
            for job in jobs:
                job.result(60)
    _drained(server)


def _one(client: Client, letter: int, cancel: bool) -> None:
    tokens: list[int] = []
    stream = client.stream(_prompt(letter), SamplingParams(max_tokens=12))
    for chunk in stream:
        tokens += chunk.token_ids
        if cancel and len(tokens) >= 4:
            stream.close()
            break
    assert tuple(tokens) == _letters(letter, len(tokens))
    assert cancel or len(tokens) == 12


def test_aborts_leave_stages_in_step(server: Served) -> None:
    """B9: four streams, two aborted at random, many rounds; survivors equal their solo output.

    Every stage gets the same bytes of a plan; that it ran them all is what its rows say.
    """
    rng = random.Random(9)
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        seen = len(server.plans())
        for _ in range(50):
            aborted = set(rng.sample(range(4), 2))
            jobs = [pool.submit(_one, client, i, i in aborted) for i in range(4)]
            for job in jobs:
                job.result(60)
        plans = server.plans()[seen:]
        assert all(len(plan.spans) == 3 for plan in plans)
        seqs = [plan.seq for plan in plans]
        assert seqs == sorted(seqs)


def test_duplicate_id(server: Served) -> None:
    """D24: refused while the first lives, whose answer is whole; free again after it."""
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream(_prompt(0), SamplingParams(max_tokens=60), request_id="x")
        first = next(stream)
        second = pool.submit(client.generate, _prompt(1), request_id="x")
        with pytest.raises(DuplicateRequest, match="x"):
            second.result(30)
        rest = [token for chunk in stream for token in chunk.token_ids]
        assert (*first.token_ids, *rest) == _letters(0, 60)
        assert client.generate(_prompt(2), SamplingParams(max_tokens=2), request_id="x").text


def test_short_one_overtakes_long_one(server: Served) -> None:
    """D23: batching is per iteration, so a short answer doesn't wait for a long one's end."""
    with server.client() as client:
        long = client.stream(_prompt(0), SamplingParams(max_tokens=190))
        got = [next(long) for _ in range(3)]
        short = client.generate(_prompt(5), SamplingParams(max_tokens=3))
        assert short.token_ids == _letters(5, 3)
        before = sum(len(chunk.token_ids) for chunk in got)
        rest = sum(len(chunk.token_ids) for chunk in long)
        assert before + rest == 190


@pytest.mark.slow
def test_queue_of_full_size_requests(server: Served) -> None:
    """D21: six requests, each taking nearly the whole pool, end one after the other."""
    with server.client() as client, ThreadPoolExecutor(10) as pool:
        params = SamplingParams(max_tokens=250)
        jobs = [pool.submit(client.generate, _prompt(i), params) for i in range(6)]
        for letter, job in enumerate(jobs):
            assert job.result(90).token_ids == _letters(letter, 250)


def test_many_submits_and_cancels_leave_nothing(server: Served) -> None:
    """D20: two thousand of them through the front; every table is empty afterwards."""
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: _submit_and_leave(client, i), range(2000)))
    _drained(server)


def _submit_and_leave(client: Client, number: int) -> None:
    stream = client.stream(_prompt(number % CYCLE), LONG)
    stream.close()


def test_idle_costs_nothing(server: Served) -> None:
    """B13, A8: an idle pipeline sleeps, and answers at once afterwards."""
    import psutil

    stages = [psutil.Process(stage.pid) for stage in server.engine.info().stages]
    master = [t for t in threading.enumerate() if t.name == "engine-master"]
    assert len(master) == 1
    before = sum(sum(p.cpu_times()[:2]) for p in stages)
    started = time.monotonic()
    time.sleep(5.0)
    used = sum(sum(p.cpu_times()[:2]) for p in stages) - before
    assert used < 0.05 * (time.monotonic() - started) * len(stages)
    with server.client() as client:
        answer = client.generate(_prompt(0), SamplingParams(max_tokens=4))
    assert answer.token_ids == _letters(0, 4)
    assert answer.finish_reason is FinishReason.LENGTH
