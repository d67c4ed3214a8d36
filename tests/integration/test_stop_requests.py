"""Stop strings over a real port: what is streamed, counted, and told to the engine."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from orca_dist.client import AsyncClient, Chunk, Completion, joined
from orca_dist.core import FinishReason
from orca_dist.errors import InvalidRequest
from orca_dist.params import SamplingParams
from tests.fixtures.checkpoints import BANG, EOS, HELLO, byte_ids, byte_tokenizer, letter
from tests.fixtures.front import run, serving
from tests.fixtures.scripted_engine import ScriptedEngine

A = [letter("A")]
ALPHABET = {
    letter(a): letter(b)
    for a, b in zip(string.ascii_uppercase, "BCDEFGHIJKLMNOPQRSTUVWXYZA", strict=True)
}
HELLO_SMILE = {5: HELLO, HELLO: BANG, BANG: byte_ids("🙂")[0]} | dict(
    zip(byte_ids("🙂"), [*byte_ids("🙂")[1:], EOS], strict=True)
)
SMILES = HELLO_SMILE | {byte_ids("🙂")[-1]: HELLO}  # an engine that doesn't end it by itself


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path)


async def both_ways(
    client: AsyncClient, prompt: list[int], params: SamplingParams
) -> tuple[list[Chunk], Completion]:
    """The chunks of the streamed answer, and the unary one, which must say the same."""
    chunks = [chunk async for chunk in client.stream(prompt, params)]
    whole = await client.generate(prompt, params)
    streamed = joined(chunks)
    assert (streamed.text, streamed.token_ids) == (whole.text, whole.token_ids)
    assert (streamed.finish_reason, streamed.usage) == (whole.finish_reason, whole.usage)
    return chunks, whole


@pytest.mark.parametrize(
    ("stop", "include_stop", "text", "last"),
    [
        (["MN"], False, "BCDEFGHIJKL", "N"),
        (["M"], False, "BCDEFGHIJKL", "M"),
        (["MN"], True, "BCDEFGHIJKLMN", "N"),
        (["M"], True, "BCDEFGHIJKLM", "M"),
        (["XYZ", "MNO", "LMNOP"], False, "BCDEFGHIJKL", "O"),
        (["B"], False, "", "B"),
    ],
)
def test_f31_nothing_of_a_stop_and_nothing_after_it_is_sent(
    folder: Path, stop: list[str], include_stop: bool, text: str, last: str
) -> None:
    async def case() -> None:
        engine = ScriptedEngine(ALPHABET, max_model_len=4096)  # long after the stop
        params = SamplingParams(stop=tuple(stop), include_stop=include_stop)
        async with serving(engine, folder) as (_, client):
            chunks, whole = await both_ways(client, A, params)
        num_kept = string.ascii_uppercase.index(last)
        assert (whole.text, whole.finish_reason) == (text, FinishReason.STOP)
        assert whole.token_ids == tuple(map(letter, string.ascii_uppercase[1 : num_kept + 1]))
        assert whole.usage.completion_tokens == num_kept
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert [kept for _, kept in engine.finished] == [num_kept, num_kept]
        assert engine.cancelled == []

    run(case())


@pytest.mark.parametrize(
    ("stop", "text", "num_kept", "finished"),
    [
        ("ll", "He", 1, [1, 1]),  # inside one token
        ("o!", "Hell", 2, [2, 2]),  # over two
        ("lo!🙂", "Hel", 6, [6, 6]),  # ends with a character of several tokens
        ("🙂🙂", "Hello!🙂", 7, []),  # begun, never completed: sent at the end
    ],
)
def test_stops_inside_tokens_and_over_them(
    folder: Path, stop: str, text: str, num_kept: int, finished: list[int]
) -> None:
    async def case() -> None:
        engine = ScriptedEngine(SMILES if finished else HELLO_SMILE, max_model_len=4096)
        async with serving(engine, folder) as (_, client):
            _, whole = await both_ways(client, [5], SamplingParams(stop=(stop,)))
        assert (whole.text, whole.finish_reason) == (text, FinishReason.STOP)
        assert whole.usage.completion_tokens == len(whole.token_ids) == num_kept
        assert [kept for _, kept in engine.finished] == finished

    run(case())


def test_what_is_held_back_at_the_length_limit_is_sent(folder: Path) -> None:
    async def case() -> None:
        params = SamplingParams(stop=("DE",), max_tokens=3)
        async with serving(ScriptedEngine(ALPHABET), folder) as (_, client):
            chunks, whole = await both_ways(client, A, params)
        assert (whole.text, whole.finish_reason) == ("BCD", FinishReason.LENGTH)
        assert "".join(chunk.text for chunk in chunks) == "BCD"

    run(case())


def test_a_stop_on_the_last_token_is_a_stop(folder: Path) -> None:
    async def case() -> None:
        params = SamplingParams(stop=("CD",), max_tokens=3)
        async with serving(ScriptedEngine(ALPHABET), folder) as (_, client):
            _, whole = await both_ways(client, A, params)
        assert (whole.text, whole.finish_reason) == ("B", FinishReason.STOP)

    run(case())


def test_a_character_cut_off_can_complete_a_stop(folder: Path) -> None:
    async def case() -> None:
        params = SamplingParams(stop=("!\N{REPLACEMENT CHARACTER}",), max_tokens=3)
        async with serving(ScriptedEngine(HELLO_SMILE), folder) as (_, client):
            _, whole = await both_ways(client, [5], params)
        assert (whole.text, whole.finish_reason) == ("Hello", FinishReason.STOP)
        assert whole.usage.completion_tokens == 3

    run(case())


@pytest.mark.parametrize(
    ("stop", "problem"),
    [
        (("x",) * 17, "17 texts; at most 16"),
        (("x",) * 1000, "1000 texts; at most 16"),
        (("x", ""), "text 1 is empty"),
        (("x" * 257,), "text 0 has 257 characters; at most 256"),
    ],
)
def test_stops_out_of_bounds_are_refused(folder: Path, stop: tuple[str, ...], problem: str) -> None:
    async def case() -> None:
        engine = ScriptedEngine(ALPHABET)
        async with serving(engine, folder) as (_, client):
            with pytest.raises(InvalidRequest, match=problem) as raised:
                await client.generate(A, SamplingParams(stop=stop))
            assert raised.value.field == "stop"
            assert engine.submitted == []
            bounds = SamplingParams(stop=("é" * 256,) * 16, max_tokens=2)
            assert (await client.generate(A, bounds)).text == "BC"

    run(case())
