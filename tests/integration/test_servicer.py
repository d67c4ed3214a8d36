"""The gRPC service over a real port: text, limits, bad input; the engine is scripted."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from orca_dist.client import AsyncClient, Client, DeadlineExceeded
from orca_dist.core import FinishReason
from orca_dist.errors import (
    DuplicateRequest,
    InvalidRequest,
    MissingCapability,
    OrcaError,
    QueueFull,
    RequestFailed,
)
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.server.prompts import PromptReader
from tests.fixtures.checkpoints import (
    BANG,
    EOS,
    HELLO,
    SPACE,
    byte_ids,
    byte_tokenizer,
    letter,
)
from tests.fixtures.front import CHAT_TEMPLATE, run, serving
from tests.fixtures.scripted_engine import FAILING, ScriptedEngine

SMILE = byte_ids("🙂")
ZHONG = byte_ids("中")
ACUTE = byte_ids("é")
ANSWER = [HELLO, *SMILE, BANG, *ZHONG, *ACUTE, EOS]
PROMPT = [5]


def scripted(answer: list[int]) -> dict[int, int]:
    """A script that answers PROMPT with `answer`."""
    return dict(zip([*PROMPT, *answer], answer, strict=False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path, chat_template=CHAT_TEMPLATE)


# ---- answers -----------------------------------------------------------


def test_streamed_text_holds_whole_characters_and_ids_are_never_held_back(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(scripted(ANSWER), turn_s=0.1)  # so slow that none are joined
        async with serving(engine, folder) as (_, client):
            chunks = [chunk async for chunk in client.stream(PROMPT)]
        assert [chunk.token_ids for chunk in chunks] == [(token,) for token in ANSWER]
        assert [chunk.text for chunk in chunks if chunk.text] == ["Hello", "🙂", "!", "中", "é"]
        assert {chunk.finish_reason for chunk in chunks[:-1]} == {None}
        assert {chunk.usage for chunk in chunks[:-1]} == {None}
        assert chunks[-1].finish_reason is FinishReason.STOP
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (1, len(ANSWER))

    run(case())


@pytest.mark.parametrize("answer", [ANSWER, SMILE[:3], [*ACUTE[:1], *ACUTE[:1], HELLO]])
def test_unary_text_is_the_streamed_text_joined(folder: Path, answer: list[int]) -> None:
    async def case() -> None:
        params = SamplingParams(max_tokens=len(answer))
        async with serving(ScriptedEngine(scripted(answer)), folder) as (_, client):
            chunks = [chunk async for chunk in client.stream(PROMPT, params)]
            whole = await client.generate(PROMPT, params)
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert whole.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
        assert (whole.finish_reason, whole.usage) == (chunks[-1].finish_reason, chunks[-1].usage)

    run(case())


def test_a_character_cut_off_by_max_tokens_ends_in_replacement_characters(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(scripted(SMILE)), folder) as (_, client):
            answer = await client.generate(PROMPT, SamplingParams(max_tokens=3))
        assert set(answer.text) == {"\N{REPLACEMENT CHARACTER}"}
        assert answer.finish_reason is FinishReason.LENGTH

    run(case())


def test_text_and_chat_reach_the_engine_as_ids(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with serving(engine, folder) as (_, client):
            await client.generate("ABC", SamplingParams(max_tokens=1))
            messages = [{"role": "system", "content": "BC"}, {"role": "user", "content": "D"}]
            await client.generate(messages, SamplingParams(max_tokens=1))
        expected = [(SPACE, *map(letter, "ABC")), (SPACE, *map(letter, "SBCUDA"))]
        assert [request.prompt for request in engine.submitted] == expected

    run(case())


def test_a_chat_needs_a_chat_template(tmp_path: Path) -> None:
    async def case() -> None:
        folder = byte_tokenizer(tmp_path)
        async with serving(ScriptedEngine(), folder) as (_, client):
            with pytest.raises(MissingCapability, match="no chat template"):
                await client.generate([{"role": "user", "content": "A"}])
            assert (await client.generate("A", SamplingParams(max_tokens=1))).text

    run(case())


def test_eos_of_the_request_is_honoured_and_can_be_ignored(folder: Path) -> None:
    async def case() -> None:
        script = scripted([HELLO, EOS, BANG])
        async with serving(ScriptedEngine(script), folder) as (_, client):
            stopped = await client.generate(PROMPT)
            on = await client.generate(PROMPT, SamplingParams(ignore_eos=True, max_tokens=3))
        assert stopped.token_ids == (HELLO, EOS)
        assert on.token_ids == (HELLO, EOS, BANG)

    run(case())


def test_a_request_that_fails_inside_ends_alone(folder: Path) -> None:
    async def case() -> None:
        script = {5: FAILING, 6: BANG}
        async with serving(ScriptedEngine(script), folder) as (_, client):
            good = asyncio.create_task(client.generate([6], SamplingParams(max_tokens=20)))
            with pytest.raises(RequestFailed, match="NaN logits"):
                await client.generate([5])
            assert (await good).usage.completion_tokens == 20

    run(case())


def test_server_info_tells_stages_and_limits(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (_, client):
            info = await client.info()
        assert (info.model, info.epoch, info.max_model_len, info.kv_tokens) == ("tiny", 1, 64, 256)
        assert [stage.layers for stage in info.stages] == [range(3), range(3, 5)]
        assert [(stage.node, stage.pid, stage.state) for stage in info.stages] == [
            ("a", 7, "ready"),
            ("b", 8, "ready"),
        ]

    run(case())


def test_the_blocking_client_says_the_same(folder: Path) -> None:
    def talk(address: str) -> None:
        with Client(address) as client:
            assert client.health()
            assert client.info().model == "tiny"
            whole = client.generate(PROMPT)
            assert "".join(chunk.text for chunk in client.stream(PROMPT)) == whole.text
            with pytest.raises(InvalidRequest, match="top_p"):
                client.generate(PROMPT, SamplingParams(top_p=2.0))

    async def case() -> None:
        async with serving(ScriptedEngine(scripted(ANSWER)), folder) as (server, _):
            await asyncio.to_thread(talk, server.address)

    run(case())


# ---- request ids -------------------------------------------------------


def test_a_live_request_id_is_refused_and_free_again_afterwards(folder: Path) -> None:
    async def case() -> None:
        params = SamplingParams(max_tokens=40)
        async with serving(ScriptedEngine(), folder) as (_, client):
            first = client.stream(PROMPT, params, request_id="x")
            chunks = [await anext(first)]
            with pytest.raises(DuplicateRequest, match="'x' is in use"):
                await client.generate(PROMPT, request_id="x")
            chunks += [chunk async for chunk in first]
            again = await client.generate(PROMPT, params, request_id="x")
        assert sum(len(chunk.token_ids) for chunk in chunks) == 40
        assert {chunk.request_id for chunk in chunks} == {"x"} == {again.request_id}

    run(case())


def test_requests_without_an_id_get_different_ones(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (_, client):
            one, two = [await client.generate(PROMPT) for _ in range(2)]
        assert one.request_id
        assert one.request_id != two.request_id

    run(case())


def test_large_prompts_are_tokenised_off_the_loop() -> None:
    class Encoder:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [threading.get_ident()]

    class NoChat:
        def render(self, messages: object) -> str:
            raise AssertionError("not a chat")

    async def case() -> None:
        reader = PromptReader(Encoder(), NoChat())
        small = await reader.read(pb.GenerateRequest(text="A"))
        large = await reader.read(pb.GenerateRequest(text="A" * 100_000))
        assert small == [threading.get_ident()]
        assert large != small

    run(case())


def test_e30_a_full_queue_refuses_at_once_and_serves_the_admitted(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(paused=True, max_running=1)
        params = SamplingParams(max_tokens=3)
        async with serving(engine, folder, max_queue=4) as (_, client):
            calls = [asyncio.create_task(client.generate(PROMPT, params)) for _ in range(20)]
            while sum(call.done() for call in calls) < 16:
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=0.1)
            refusals = [call.exception() for call in calls if call.done()]
            assert {type(error) for error in refusals} == {QueueFull}
            assert {getattr(error, "retry_after_s", 0) for error in refusals} == {1.0}
            engine.resume()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(not isinstance(answer, BaseException) for answer in answers) == 4
            await client.generate(PROMPT, params)

    run(case())


def test_a_queue_full_of_tokens_refuses_at_once_too(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(paused=True)
        params = SamplingParams(max_tokens=3)
        async with serving(engine, folder, max_queue_tokens=40) as (_, client):
            waiting = asyncio.create_task(client.generate(PROMPT * 30, params))
            await asyncio.to_thread(engine.wait_for, lambda: bool(engine.submitted))
            with pytest.raises(QueueFull, match=r"30 prompt tokens .* 11 more") as raised:
                await client.generate(PROMPT * 11, params)
            assert raised.value.retry_after_s == 1.0
            fits = asyncio.create_task(client.generate(PROMPT * 10, params))
            await asyncio.to_thread(engine.wait_for, lambda: len(engine.submitted) == 2)
            engine.resume()
            for call in (waiting, fits):
                assert (await call).usage.completion_tokens == 3
            await client.generate(PROMPT * 60, params)

    run(case())


def test_a_fault_of_ours_is_internal_and_gives_the_request_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(tokenizer: object) -> object:
        raise RuntimeError("a secret detail")

    async def case(client: AsyncClient, engine: ScriptedEngine) -> None:
        monkeypatch.setattr("orca_dist.server.app.Detokenizer", broken)
        with pytest.raises(OrcaError) as raised:
            await client.generate(PROMPT)
        assert raised.value.status == "INTERNAL"
        assert "secret" not in str(raised.value)
        monkeypatch.undo()
        assert engine.wait_for(lambda: engine.cancelled == [engine.submitted[0].id])
        await client.generate(PROMPT)

    async def whole() -> None:
        engine = ScriptedEngine(paused=True)
        async with serving(engine, folder) as (_, client):
            task = asyncio.create_task(case(client, engine))
            await asyncio.to_thread(engine.wait_for, lambda: bool(engine.cancelled))
            engine.resume()
            await task

    run(whole())
    assert "a secret detail" in caplog.text


def test_a_deadline_is_reported_as_one(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(paused=True), folder) as (_, client):
            with pytest.raises(DeadlineExceeded, match="within the timeout"):
                await client.generate(PROMPT, timeout_s=0.2)

    run(case())
