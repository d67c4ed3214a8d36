"""What the front makes of a request: its limits, its name, its place in the queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orca_dist.engine.streams import EngineStreams, RequestStream
from orca_dist.errors import (
    DuplicateRequest,
    InvalidRequest,
    QueueFull,
)
from orca_dist.params import SamplingParams
from tests.fixtures.noting_master import (
    EOS,
    MAX_LEN,
    VOCAB,
    NotingMaster,
    make_streams,
    on_loop,
    open_one,
    read,
    tell,
)

GREEDY = SamplingParams(max_tokens=8)


@pytest.fixture
def master() -> NotingMaster:
    return NotingMaster()


@pytest.fixture
def streams(master: NotingMaster) -> EngineStreams:
    return make_streams(master)


# ---- what becomes of a request -----------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "granted"),
    [(63, 1, 1), (63, None, 1), (60, 4, 4), (60, 5, 4), (60, None, 4), (1, 8, 8), (1, None, 63)],
)
@on_loop
async def test_max_tokens_is_a_cap_within_the_room(
    streams: EngineStreams,
    master: NotingMaster,
    prompt_len: int,
    max_tokens: int | None,
    granted: int,
) -> None:
    prompt = [3] * prompt_len
    stream = streams.open(prompt=prompt, params=SamplingParams(max_tokens=max_tokens))
    (request,) = master.submitted
    assert (request.prompt, request.max_tokens) == (tuple(prompt), granted)
    assert (stream.key, stream.num_prompt_tokens) == (request.id, prompt_len)


@pytest.mark.parametrize(("kv_tokens", "limit"), [(40, "kv_tokens"), (1000, "max_model_len")])
@on_loop
async def test_the_room_is_the_smaller_of_model_and_memory(
    master: NotingMaster, kv_tokens: int, limit: str
) -> None:
    streams = make_streams(master, kv_tokens=kv_tokens)
    room = min(kv_tokens, MAX_LEN)
    streams.open(prompt=[1] * (room - 1), params=SamplingParams())
    with pytest.raises(InvalidRequest) as caught:
        streams.open(prompt=[1] * room, params=SamplingParams())
    assert f"{room} tokens leave no room" in str(caught.value)
    assert f"at most {room} ({limit})" in str(caught.value)
    assert [request.max_tokens for request in master.submitted] == [1]


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], GREEDY, "prompt"),
        ([1] * 65, GREEDY, "prompt"),
        ([-1], GREEDY, "token_ids"),
        ([VOCAB], GREEDY, "token_ids"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1], SamplingParams(temperature=-0.1), "temperature"),
        ([1], SamplingParams(temperature=float("nan")), "temperature"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
        ([1], SamplingParams(top_k=-2), "top_k"),
        ([1], SamplingParams(min_p=1.5), "min_p"),
        ([1], SamplingParams(seed=2**64), "seed"),
    ],
)
@on_loop
async def test_a_bad_request_is_refused_by_field_and_leaves_no_trace(
    streams: EngineStreams,
    master: NotingMaster,
    prompt: list[int],
    params: SamplingParams,
    named: str,
) -> None:
    for _ in range(5):
        with pytest.raises(InvalidRequest) as caught:
            streams.open(prompt=prompt, params=params, request_id="mine")
        assert caught.value.field == named
    assert master.submitted == []
    assert open_one(streams, "mine").request_id == "mine"


@on_loop
async def test_a_given_seed_is_kept_and_a_missing_one_drawn(
    streams: EngineStreams, master: NotingMaster
) -> None:
    given = [0, 42, 2**64 - 1]
    for seed in [*given, None, None, None]:
        open_one(streams, seed=seed, temperature=1.0).close()
    seeds = [request.sampling.seed for request in master.submitted]
    assert seeds[:3] == given
    assert len(set(seeds[3:])) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


@on_loop
async def test_eos_ends_a_request_unless_ignored(
    streams: EngineStreams, master: NotingMaster
) -> None:
    open_one(streams)
    open_one(streams, ignore_eos=True)
    assert [request.stop_ids for request in master.submitted] == [EOS, frozenset()]


# ---- names and places --------------------------------------------------


@on_loop
async def test_a_live_request_id_is_refused_until_it_has_ended(streams: EngineStreams) -> None:
    ends: list[Callable[[RequestStream], None]] = [
        lambda stream: tell(streams, stream, 1, end="length"),
        lambda stream: tell(streams, stream, end="error"),
        lambda stream: stream.close(),
        lambda stream: stream.finish(0),
    ]
    for end in ends:
        stream = open_one(streams, "mine")
        with pytest.raises(DuplicateRequest, match="'mine'"):
            open_one(streams, "mine")
        end(stream)
    open_one(streams, "mine")


@on_loop
async def test_requests_without_an_id_get_different_ones(streams: EngineStreams) -> None:
    named = open_one(streams, "r2")
    unnamed = [open_one(streams), open_one(streams)]
    names = [stream.request_id for stream in (named, *unnamed)]
    assert len(set(names)) == 3
    for stream in (*unnamed, named):
        tell(streams, stream, 1, end="length")
        assert await read(stream) == [1]


@on_loop
async def test_the_bound_counts_those_that_have_not_run(
    streams: EngineStreams, master: NotingMaster
) -> None:
    waiting = [open_one(streams) for _ in range(3)]
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        open_one(streams)
    assert len(master.submitted) == 3
    tell(streams, waiting[0], 1)
    open_one(streams)
    with pytest.raises(QueueFull):
        open_one(streams)


@on_loop
async def test_the_bound_on_tokens_counts_those_that_wait(
    streams: EngineStreams, master: NotingMaster
) -> None:
    def open_long(prompt_len: int) -> RequestStream:
        return streams.open(prompt=[1] * prompt_len, params=GREEDY)

    first = open_long(50)
    with pytest.raises(QueueFull, match=r"50 prompt tokens are waiting .* 51 more .* = 100"):
        open_long(51)
    second = open_long(50)
    with pytest.raises(QueueFull):
        open_long(1)
    tell(streams, first, 1)
    third = open_long(50)
    second.close()
    third.finish(0)
    assert len(master.submitted) == 3
    open_long(60)


@on_loop
async def test_a_prompt_above_the_bound_is_taken_where_nothing_waits(master: NotingMaster) -> None:
    streams = make_streams(master, max_queue_tokens=10)
    running = streams.open(prompt=[1] * 40, params=GREEDY)
    with pytest.raises(QueueFull):
        streams.open(prompt=[1], params=GREEDY)
    tell(streams, running, 1)
    streams.open(prompt=[1] * 40, params=GREEDY)


@on_loop
async def test_whoever_leaves_gives_its_place_back_once(streams: EngineStreams) -> None:
    for _ in range(5):
        leaving = [open_one(streams) for _ in range(3)]
        leaving[0].close()
        leaving[0].close()
        leaving[1].finish(0)
        tell(streams, leaving[2], 1, end="length")
        tell(streams, leaving[2], 1, end="length")
    for _ in range(3):
        open_one(streams)
    with pytest.raises(QueueFull):
        open_one(streams)


@pytest.mark.parametrize("token", [1.5, True, "5", None])
@on_loop
async def test_tokens_that_are_no_numbers_are_refused(
    streams: EngineStreams, master: NotingMaster, token: object
) -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids: .* is not a whole number"):
        streams.open(prompt=[3, token], params=SamplingParams())  # type: ignore[list-item]
    assert master.submitted == []


@on_loop
async def test_more_logits_than_the_control_plane_carries_are_refused(
    monkeypatch: pytest.MonkeyPatch, streams: EngineStreams, master: NotingMaster
) -> None:
    monkeypatch.setattr("orca_dist.engine.streams.MAX_LOGITS_BYTES", 10 * VOCAB * 4)
    params = SamplingParams(max_tokens=5, return_logits=True)
    streams.open(prompt=[3] * 5, params=params)
    with pytest.raises(InvalidRequest, match="return_logits: 11 positions"):
        streams.open(prompt=[3] * 6, params=params)
