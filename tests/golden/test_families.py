"""Every family and rope type against transformers: logits in fp32, likeliest tokens in bf16.

Loud weights; prefill and 24 decode steps, each request alone and all in mixed batches, with
whole prompts and with chunks of them, on 1, 2, 3 and 5 stages. Stages run as threads of this
process, so that many layouts cost little; what a stage loads and computes is what it would as
a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from orca_dist.core import Request, Sampling
from orca_dist.spec import load_spec
from tests.fixtures.checkpoints import LOUD_VOCAB_SIZE, loud_model
from tests.fixtures.families import VARIANTS
from tests.fixtures.golden_measure import (
    CHUNKED,
    MAX_TOKENS,
    MIN_AGREEMENT,
    MIN_ROUTED_AGREEMENT,
    NUM_STAGES,
    PROMPTS,
    TOLERANCE,
)
from tests.fixtures.thread_pipeline import (
    FILLED,
    Answer,
    ThreadPipeline,
    load_stages,
    running,
    thread_pipeline,
)

SLOW = pytest.mark.slow
SLOW_VARIANT = "mixtral, one of four and a window"
EACH_NUMBER = [pytest.param(num, marks=() if num == 2 else SLOW) for num in NUM_STAGES]

# Rope types differ in a table of angles alone, which test_logits holds for each of them.
few_ropes = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(name, marks=SLOW if ", rope " in name or name == SLOW_VARIANT else ())
        for name in VARIANTS
    ],
    indirect=True,
    scope="module",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A folder, and what transformers makes of it."""

    folder: Path
    model: PreTrainedModel

    def logits(self, ids: list[int]) -> np.ndarray:
        """For every position of `ids`, [T, V]."""
        with torch.inference_mode():
            logits: np.ndarray = self.model(torch.tensor([ids])).logits[0].float().numpy()
        return logits


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=SLOW if name == SLOW_VARIANT else ()) for name in VARIANTS],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_model(tmp_path_factory.mktemp("model"), VARIANTS[request.param])


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Truth(folder=folder, model=model)


@pytest.mark.parametrize("num_stages", EACH_NUMBER)
def test_logits(truth: Truth, num_stages: int) -> None:
    """Alone; joining while others decode; so with prompts in chunks: right, and the same bits."""
    stages = load_stages(truth.folder, num_stages)
    with running(stages, FILLED) as pipeline:
        alone = [pipeline.alone(request) for request in _requests()]
        mixed = _in_mixed_batches(pipeline)
    with running(stages, CHUNKED) as pipeline:
        chunked = _in_mixed_batches(pipeline)
        assert max(sum(plan.lengths) for plan in pipeline.plans) == CHUNKED.max_batch_tokens
    for prompt, single, joined, cut in zip(PROMPTS, alone, mixed, chunked, strict=True):
        expected = truth.logits([*prompt, *single.tokens[:-1]])
        np.testing.assert_allclose(_logits(single), expected, atol=TOLERANCE, rtol=0)
        assert single.tokens == expected[len(prompt) - 1 :].argmax(-1).tolist()
        assert joined.tokens == cut.tokens == single.tokens
        np.testing.assert_array_equal(_logits(joined), _logits(single))
        np.testing.assert_array_equal(_logits(cut), _logits(single))


@few_ropes
def test_bfloat16_agrees_on_the_likeliest_token(folder: Path) -> None:
    """Both round, each in its own order: most tokens are the same, and none is NaN.

    transformers' own ways to compute experts agree with each other on 86 to 99 % here.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    truth, same = Truth(folder=folder, model=model), []
    with thread_pipeline(folder, 2, dtype="bfloat16") as pipeline:
        alone = [pipeline.alone(request) for request in _requests()]
        mixed = _in_mixed_batches(pipeline)
    for prompt, single, joined in zip(PROMPTS, alone, mixed, strict=True):
        ours, theirs = _logits(single), truth.logits([*prompt, *single.tokens[:-1]])
        np.testing.assert_array_equal(_logits(joined), ours)
        assert np.isfinite(ours).all()
        same += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
    has_experts = load_spec(folder).experts is not None
    assert np.mean(same) >= (MIN_ROUTED_AGREEMENT if has_experts else MIN_AGREEMENT)


@few_ropes
def test_a_prompt_in_chunks_has_the_same_bits(folder: Path) -> None:
    """Chunks of at most 21 tokens, in several iterations and in flight at once."""
    request = _requests()[-1]
    with thread_pipeline(folder, 3, dtype="bfloat16") as pipeline:
        whole = pipeline.alone(request)
    with thread_pipeline(folder, 3, dtype="bfloat16", schedule=CHUNKED) as pipeline:
        chunked = pipeline.alone(request)
        assert [max(plan.lengths) for plan in pipeline.plans[:6]] == [21, 21, 21, 21, 21, 15]
    assert chunked.tokens == whole.tokens
    np.testing.assert_array_equal(_logits(chunked), _logits(whole))


def _in_mixed_batches(pipeline: ThreadPipeline) -> list[Answer]:
    before, requests = len(pipeline.plans), _requests()
    answers = pipeline.run({0: requests[:2], 3: requests[2:]})
    plans = pipeline.plans[before:]
    assert any(1 in plan.lengths and max(plan.lengths) > 1 for plan in plans)
    return [answers[request.id] for request in requests]


def _requests() -> list[Request]:
    sampling = Sampling(return_logits=True)
    return [
        Request(id=index, prompt=tuple(prompt), max_tokens=MAX_TOKENS, sampling=sampling)
        for index, prompt in enumerate(PROMPTS)
    ]


def _logits(answer: Answer) -> np.ndarray:
    return answer.logits(LOUD_VOCAB_SIZE)
