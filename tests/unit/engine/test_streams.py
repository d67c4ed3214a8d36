"""A stream's outputs and its ends: by itself, by its reader, by a failure or a loss."""

from __future__ import annotations

import asyncio

import pytest

from orca_dist.core import FinishReason, Output
from orca_dist.engine.streams import (
    MAX_JOINED_TOKENS,
    EngineStreams,
    RequestStream,
)
from orca_dist.errors import (
    OrcaError,
    PipelineLost,
    RequestCancelled,
    RequestFailed,
)
from tests.fixtures.noting_master import (
    NotingMaster,
    make_streams,
    on_loop,
    open_one,
    read,
    tell,
)


@pytest.fixture
def master() -> NotingMaster:
    return NotingMaster()


@pytest.fixture
def streams(master: NotingMaster) -> EngineStreams:
    return make_streams(master)


# ---- outputs -----------------------------------------------------------


@on_loop
async def test_outputs_come_in_order_each_to_its_stream(streams: EngineStreams) -> None:
    a, b = open_one(streams), open_one(streams)
    streams.deliver([Output(id=b.key, tokens=(1,)), Output(id=a.key, tokens=(2,))])
    streams.deliver([Output(id=a.key, tokens=(3, 4)), Output(id=99, tokens=(9,))])
    tell(streams, b, 5, end="stop")
    tell(streams, a, 6, end="length")
    assert await read(a) == [2, 3, 4, 6]
    assert await read(b) == [1, 5]
    assert (a.reason, a.num_tokens) == (FinishReason.LENGTH, 4)
    assert (b.reason, b.num_tokens) == (FinishReason.STOP, 2)


@on_loop
async def test_a_waiting_reader_is_woken(streams: EngineStreams) -> None:
    stream = open_one(streams)
    reader = asyncio.create_task(read(stream))
    for token in (1, 2):
        await asyncio.sleep(0)
        tell(streams, stream, token)
    await asyncio.sleep(0)
    assert not reader.done()
    tell(streams, stream, 3, end="length")
    assert await reader == [1, 2, 3]


@on_loop
async def test_after_its_end_a_stream_stays_ended(streams: EngineStreams) -> None:
    stream = open_one(streams)
    tell(streams, stream, 1, end="length")
    tell(streams, stream, 2)
    assert await read(stream) == [1]
    for _ in range(3):
        assert await read(stream) == []


@on_loop
async def test_for_a_reader_that_does_not_read_little_is_kept(streams: EngineStreams) -> None:
    stream = open_one(streams)
    tokens = [number % 300 for number in range(5000)]
    for token in tokens[:-1]:
        tell(streams, stream, token)
    tell(streams, stream, tokens[-1], end="length")
    outputs = [output async for output in stream]
    assert [token for output in outputs for token in output.tokens] == tokens
    assert outputs[-1].reason is FinishReason.LENGTH
    assert len(outputs) == 5
    assert max(len(output.tokens) for output in outputs) <= MAX_JOINED_TOKENS


@on_loop
async def test_what_was_joined_is_no_one_elses(streams: EngineStreams) -> None:
    """The master may keep what it handed over: it is not changed here."""
    stream = open_one(streams)
    handed = [Output(id=stream.key, tokens=(number,)) for number in range(100)]
    streams.deliver(handed)
    assert [output.tokens for output in handed] == [(number,) for number in range(100)]
    stream.close()
    with pytest.raises(RequestCancelled):
        await read(stream)


@on_loop
async def test_logits_are_not_joined(streams: EngineStreams) -> None:
    stream = open_one(streams)
    for number in range(100):
        streams.deliver([Output(id=stream.key, tokens=(number,), logits=b"abcd")])
    tell(streams, stream, 1, end="length")
    assert len([output async for output in stream]) == 101


@on_loop
async def test_what_is_read_counts_and_what_waits_does_not(streams: EngineStreams) -> None:
    stream = open_one(streams)
    tell(streams, stream, 1, 2)
    assert stream.num_tokens == 0
    await anext(stream)
    tell(streams, stream, 3)
    assert (stream.num_tokens, stream.reason) == (2, None)


@on_loop
async def test_a_reader_that_falls_behind_gets_all_that_came_as_one(
    streams: EngineStreams,
) -> None:
    stream = open_one(streams)
    parts = [
        Output(id=stream.key, tokens=(1,), cached_tokens=16),
        Output(id=stream.key, tokens=(2, 3)),
        Output(id=stream.key, tokens=(4,), reason=FinishReason.LENGTH),
    ]
    for part in parts:
        streams.deliver([part])
    whole = await anext(stream)
    assert tuple(whole.tokens) == (1, 2, 3, 4)
    assert (whole.reason, stream.reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert (stream.num_tokens, stream.cached_tokens) == (4, 16)
    assert await read(stream) == []


@on_loop
async def test_tokens_that_came_before_an_error_are_read_before_it(streams: EngineStreams) -> None:
    stream = open_one(streams)
    for token in (1, 2):
        tell(streams, stream, token)
    streams.deliver([Output(id=stream.key, reason=FinishReason.ERROR, message="broken")])
    assert tuple((await anext(stream)).tokens) == (1, 2)
    await ends_with(stream, RequestFailed, "broken")


# ---- ends --------------------------------------------------------------


async def ends_with(stream: RequestStream, kind: type[OrcaError], match: str = "") -> None:
    """The error is raised once; then the stream is at its end."""
    with pytest.raises(kind, match=match):
        await anext(stream)
    assert await read(stream) == []


@on_loop
async def test_a_failed_request_raises_its_message(
    streams: EngineStreams, master: NotingMaster
) -> None:
    stream, other = open_one(streams), open_one(streams)
    tell(streams, stream, 1)
    failed = Output(id=stream.key, reason=FinishReason.ERROR, message="logits are not finite")
    streams.deliver([failed])
    tell(streams, other, 5, end="length")
    assert (await anext(stream)).tokens == (1,)
    await ends_with(stream, RequestFailed, "logits are not finite")
    assert await read(other) == [5]
    stream.close()
    assert master.cancelled == []


@on_loop
async def test_close_takes_the_request_back_once(
    streams: EngineStreams, master: NotingMaster
) -> None:
    stream = open_one(streams, "mine")
    tell(streams, stream, 1)
    for _ in range(3):
        stream.close()
    assert master.cancelled == [stream.key]
    tell(streams, stream, 2)
    assert (await anext(stream)).tokens == (1,)
    await ends_with(stream, RequestCancelled, "request mine was cancelled")


@on_loop
async def test_close_wakes_a_waiting_reader(streams: EngineStreams) -> None:
    stream = open_one(streams)
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(RequestCancelled):
        await reader


@on_loop
async def test_close_after_the_end_says_nothing(
    streams: EngineStreams, master: NotingMaster
) -> None:
    stream = open_one(streams)
    tell(streams, stream, 1, end="length")
    stream.close()
    assert await read(stream) == [1]
    stream.close()
    assert master.cancelled == []
    assert stream.reason is FinishReason.LENGTH


@on_loop
async def test_finish_ends_the_stream_at_what_is_kept(
    streams: EngineStreams, master: NotingMaster
) -> None:
    stream = open_one(streams)
    for token in (1, 2):
        tell(streams, stream, token)
    await anext(stream)
    tell(streams, stream, 3)
    stream.finish(2)
    tell(streams, stream, 4)
    assert await read(stream) == []
    assert (stream.num_tokens, stream.reason) == (2, FinishReason.STOP)
    stream.close()
    assert (master.finished, master.cancelled) == ([(stream.key, 2)], [])


@on_loop
async def test_finish_wakes_a_waiting_reader(streams: EngineStreams) -> None:
    stream = open_one(streams)
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.finish(0)
    assert await reader == []


@on_loop
async def test_finish_after_the_end_says_nothing(
    streams: EngineStreams, master: NotingMaster
) -> None:
    stream = open_one(streams)
    tell(streams, stream, 1, end="length")
    assert await read(stream) == [1]
    stream.finish(1)
    assert master.finished == []
    assert stream.reason is FinishReason.LENGTH


@on_loop
async def test_a_lost_pipeline_ends_every_stream_and_refuses_new_ones(
    streams: EngineStreams, master: NotingMaster
) -> None:
    ended, waiting, running = open_one(streams), open_one(streams), open_one(streams)
    tell(streams, ended, 1, end="length")
    tell(streams, running, 1, 2)
    reader = asyncio.create_task(read(waiting))
    await asyncio.sleep(0)
    streams.lose(PipelineLost("stage 1 is lost"))
    assert await read(ended) == [1]
    assert (await anext(running)).tokens == (1, 2)
    await ends_with(running, PipelineLost, "stage 1 is lost")
    with pytest.raises(PipelineLost):
        await reader
    with pytest.raises(PipelineLost):
        open_one(streams)
    running.close()
    assert master.cancelled == []
