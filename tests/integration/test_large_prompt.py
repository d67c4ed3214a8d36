"""A prompt of 4 MB is tokenised beside the loop: other streams and health answers go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import pytest

from orca_dist import Client, SamplingParams
from orca_dist.errors import InvalidRequest
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import local_config
from tests.fixtures.served import Served, served

HELD_UP = 0.5  # of the time that the prompt takes; held up, others wait for nearly all of it
PROMPT = "Hello world! " * (4 * 2**20 // 13)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = loud_llama(tmp_path_factory.mktemp("loud"))
    with served(folder, local_config(2)) as server:
        yield server


def test_others_go_on(server: Served) -> None:
    with server.client() as client, ThreadPoolExecutor(2) as pool:
        submitted = time.monotonic()
        large = pool.submit(_refused, client)
        stream = pool.submit(_token_times, client, large)
        answers_s = []
        while not large.done():
            started = time.monotonic()
            assert client.health()
            answers_s.append(time.monotonic() - started)
        taken_s = time.monotonic() - submitted
        assert "tokens leave no room" in large.result()
        gaps_s = [after - before for before, after in pairwise(stream.result(60))]
    assert len(answers_s) > 3
    assert max(answers_s) < HELD_UP * taken_s
    assert len(gaps_s) > 3
    assert max(gaps_s) < HELD_UP * taken_s


def _refused(client: Client) -> str:
    with pytest.raises(InvalidRequest) as raised:
        client.generate(PROMPT)
    return str(raised.value)


def _token_times(client: Client, until: Future[str]) -> list[float]:
    """When tokens came, of one stream after another, for as long as the large prompt takes."""
    times_s: list[float] = []
    while not until.done() or len(times_s) < 20:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        times_s += [time.monotonic() for _ in client.stream([5, 9], params)]
    return times_s
