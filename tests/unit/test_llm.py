"""The LLM object: prompts, answers, errors, logits; a scripted engine in place of the stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orca_dist.config import DeviceKind, Dtype, EngineConfig, Launcher
from orca_dist.core import FinishReason
from orca_dist.engine.engine import Engine
from orca_dist.errors import ConfigError, InvalidRequest, ModelError, PipelineLost
from orca_dist.llm import LLM, resolve_model
from orca_dist.params import SamplingParams
from tests.fixtures.checkpoints import BANG, EOS, HELLO, SPACE, byte_tokenizer, letter
from tests.fixtures.scripted_engine import SPEC, ScriptedEngine

SCRIPT = {5: HELLO, HELLO: BANG, BANG: EOS, letter("A"): letter("B"), letter("B"): EOS}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine(SCRIPT, default=letter("Z"))

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
    params = SamplingParams(stop=("o!",), return_logits=True)
    one, two = llm.generate(
        [[5, 5], [5]], [params, SamplingParams(stop=("o!",), include_stop=True)]
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


def test_a_model_that_is_no_folder_is_named() -> None:
    with pytest.raises(ModelError, match="no/such/model is not a folder"):
        resolve_model("no/such/model")


def test_close_can_be_repeated(engine: ScriptedEngine, tmp_path: Path) -> None:
    llm = LLM(byte_tokenizer(tmp_path))
    llm.close()
    llm.close()
