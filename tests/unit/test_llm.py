"""The LLM object: prompts, answers, errors, logits; a scripted engine in place of the stages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import orca_dist
from orca_dist.config import DeviceKind, Dtype, EngineConfig, Launcher
from orca_dist.core import FinishReason
from orca_dist.engine.engine import Engine
from orca_dist.errors import ConfigError, InvalidRequest, ModelError, PipelineLost
from orca_dist.llm import LLM, resolve_model
from orca_dist.params import SamplingParams
from tests.fixtures.checkpoints import BANG, EOS, HELLO, SPACE, byte_tokenizer, letter
from tests.fixtures.scripted_engine import SPEC, ScriptedEngine

WAIT_S = 30.0
SCRIPT = {5: HELLO, HELLO: BANG, BANG: EOS, letter("A"): letter("B"), letter("B"): EOS}


def test_every_name_of_the_package_is_there() -> None:
    assert {name for name in orca_dist.__all__ if isinstance(getattr(orca_dist, name), type)} == {
        *("LLM", "Completion", "Client", "AsyncClient"),
        *("SamplingParams", "EngineConfig", "OrcaError", "Tls"),
    }
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        orca_dist.Engine  # noqa: B018


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine(SCRIPT, default=letter("Z"), max_model_len=4096)

    def start(model: Path, config: EngineConfig, *, num_token_ids: int) -> ScriptedEngine:
        assert num_token_ids == SPEC.vocab_size
        engine.config = config  # type: ignore[attr-defined]
        return engine.__enter__()

    monkeypatch.setattr(Engine, "start", start)
    return engine


@pytest.fixture
def llm(engine: ScriptedEngine, tmp_path: Path) -> Iterator[LLM]:
    with LLM(byte_tokenizer(tmp_path)) as llm:
        yield llm


def test_answers_come_in_the_prompts_order_with_each_ones_params(llm: LLM) -> None:
    one, two = llm.generate(
        [[5], "A"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=9)]
    )
    assert (one.text, one.token_ids, one.finish_reason) == (
        "Hello!",
        [HELLO, BANG],
        FinishReason.LENGTH,
    )
    assert (two.text, two.token_ids, two.finish_reason) == (
        "B",
        [letter("B"), EOS],
        FinishReason.STOP,
    )
    assert (two.usage.prompt_tokens, two.usage.completion_tokens) == (2, 2)
    assert one.logprobs is None
    assert one.logits is None


def test_one_text_is_a_list_of_one(llm: LLM) -> None:
    (answer,) = llm.generate("A")
    assert answer.text == "B"


def test_more_prompts_than_any_queue_holds(llm: LLM) -> None:
    answers = llm.generate([[5]] * 1500, SamplingParams(max_tokens=1))
    assert [answer.token_ids for answer in answers] == [[HELLO]] * 1500


def test_a_bad_prompt_is_refused_and_takes_the_others_back(
    llm: LLM, engine: ScriptedEngine
) -> None:
    with pytest.raises(InvalidRequest, match="token_ids: 315"):
        llm.generate([[5, 6], [315]])
    assert engine.wait_for(lambda: engine.num_live == 0)
    assert llm.generate([[5]])[0].text == "Hello!"


def test_stop_strings_end_an_answer(llm: LLM, engine: ScriptedEngine) -> None:
    params = SamplingParams(stop=("o!",), return_logits=True, ignore_eos=True)
    one, two = llm.generate(
        [[5, 5], [5]], [params, SamplingParams(stop=("o!",), include_stop=True, ignore_eos=True)]
    )
    assert (one.text, one.token_ids, one.finish_reason) == (
        "Hell",
        [HELLO, BANG],
        FinishReason.STOP,
    )
    assert one.usage.completion_tokens == 2
    assert one.logits is not None
    assert one.logits.shape == (2 + 2 - 1, SPEC.vocab_size)
    assert two.text == "Hello!"
    assert sorted(kept for _, kept in engine.finished) == [2, 2]


def test_params_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="1 of them for 2 prompts"):
        llm.generate([[5], [6]], [SamplingParams()])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([5, 6], "prompts: number 5 given; put the token ids of a prompt in a list"),
        (b"A", "prompts: bytes given; give a text, or a list of texts and lists of token ids"),
        (None, "prompts: NoneType given; give a text"),
        (7, "prompts: int given; give a text"),
        (["A", b"B"], "prompts: bytes given as prompt 1; give text or token ids"),
        ([{"role": "user", "content": "A"}], "prompts: dict given as prompt 0; give text"),
        ([[5], [1.5]], "token_ids: prompt 1: 'float' object cannot be interpreted as an integer"),
    ],
)
def test_prompts_of_another_type_are_named(llm: LLM, prompts: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        llm.generate(prompts)  # type: ignore[arg-type]
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("params", "kind"), [(None, "NoneType"), ({"max_tokens": 1}, "dict"), ([7], "int")]
)
def test_params_of_another_type_are_named(llm: LLM, params: object, kind: str) -> None:
    with pytest.raises(InvalidRequest, match=f"params: {kind} given; give SamplingParams"):
        llm.generate([[5]], params)  # type: ignore[arg-type]


def test_token_ids_may_be_an_array(llm: LLM) -> None:
    one, two = llm.generate(np.array([[5, 5], [6, 5]]), SamplingParams(max_tokens=1))  # type: ignore[arg-type]
    assert one.token_ids == two.token_ids == [HELLO]


def test_logits_have_a_row_for_every_computed_position(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, return_logits=True)
    (answer,) = llm.generate([[letter("A"), 5]], params)
    assert answer.logits is not None
    assert answer.logits.dtype == np.float32
    assert answer.logits.shape == (2 + 2 - 1, SPEC.vocab_size)
    assert answer.logits.argmax(axis=1).tolist() == [letter("B"), HELLO, BANG]


def test_score_gives_a_row_a_token(llm: LLM) -> None:
    logits = llm.score([5, letter("A"), SPACE])
    assert logits.shape == (3, SPEC.vocab_size)
    assert logits.argmax(axis=1).tolist() == [HELLO, letter("B"), letter("Z")]


def test_a_lost_pipeline_raises(llm: LLM, engine: ScriptedEngine) -> None:
    engine.lose("stage 0 is lost: killed")
    with pytest.raises(PipelineLost, match="stage 0"):
        llm.generate("A")


def test_without_a_config_two_local_fp32_stages_are_meant(llm: LLM, engine: ScriptedEngine) -> None:
    config: EngineConfig = engine.config  # type: ignore[attr-defined]
    assert (config.stages, config.device, config.dtype, config.launcher) == (
        2,
        DeviceKind.CPU,
        Dtype.FLOAT32,
        Launcher.LOCAL,
    )


def test_arguments_win_over_the_config(engine: ScriptedEngine, tmp_path: Path) -> None:
    given = EngineConfig(stages=3, max_batch_size=5, dtype=Dtype.BFLOAT16)
    with LLM(byte_tokenizer(tmp_path), stages=1, config=given):
        config: EngineConfig = engine.config  # type: ignore[attr-defined]
    assert (config.stages, config.max_batch_size, config.dtype) == (1, 5, Dtype.BFLOAT16)
    assert config.launcher is Launcher.RAY


def test_a_word_that_is_no_choice_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device = tpu: must be one of"):
        LLM(byte_tokenizer(tmp_path), device="tpu")


def test_a_gguf_file_is_told_how_to_become_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=rf"GGUF file.*`orca-dist model convert {path} FOLDER`"):
        resolve_model(path)


def test_a_model_that_is_no_folder_is_named() -> None:
    with pytest.raises(ModelError, match="no/such/model is not a folder"):
        resolve_model("no/such/model")


def test_close_can_be_repeated(engine: ScriptedEngine, tmp_path: Path) -> None:
    llm = LLM(byte_tokenizer(tmp_path))
    llm.close()
    llm.close()


def test_a_closed_one_says_so(engine: ScriptedEngine, tmp_path: Path) -> None:
    llm = LLM(byte_tokenizer(tmp_path))
    llm.close()
    with pytest.raises(PipelineLost, match="the LLM is closed"):
        llm.generate("A")
    with pytest.raises(PipelineLost, match="the LLM is closed"):
        llm.score([5])


def test_closing_ends_the_calls_of_other_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paused = ScriptedEngine(paused=True)
    monkeypatch.setattr(Engine, "start", lambda *_, **__: paused.__enter__())
    llm = LLM(byte_tokenizer(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(llm.generate, [[5], [6]]) for _ in range(2)]
        assert paused.wait_for(lambda: paused.num_live == 4)
        llm.close()
        for call in calls:
            with pytest.raises(PipelineLost, match="the LLM is closed"):
                call.result(timeout=WAIT_S)


def test_no_call_hangs_whenever_the_close_comes(engine: ScriptedEngine, tmp_path: Path) -> None:
    def call_until_closed() -> str:
        begun.wait()
        while True:
            try:
                llm.generate([[5]], SamplingParams(max_tokens=1))
            except PipelineLost as error:
                return str(error)

    llm = LLM(byte_tokenizer(tmp_path))
    begun = threading.Barrier(5)
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(call_until_closed) for _ in range(4)]
        begun.wait()
        closes = [threads.submit(llm.close) for _ in range(2)]
        assert {call.result(timeout=WAIT_S) for call in calls} == {"the LLM is closed"}
        for close in closes:
            close.result(timeout=WAIT_S)
