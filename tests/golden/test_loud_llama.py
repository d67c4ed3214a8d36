"""Logits of live pipelines against transformers, fp32: 1, 2, 3 and 5 stages.

Loud weights, since default-initialised ones hide most faults. Prefill and 24
decode steps, each request alone and all in mixed batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from orca_dist.core import Sampling
from tests.fixtures.checkpoints import LOUD_VOCAB_SIZE, loud_llama
from tests.fixtures.golden_measure import MAX_TOKENS, PROMPTS, TOLERANCE
from tests.fixtures.live import Answer, Front, live, local_config

WITH_LOGITS = Sampling(return_logits=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module", params=[1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def front(folder: Path, request: pytest.FixtureRequest) -> Iterator[Front]:
    """Two batches in flight at most, so that five requests share them on five stages too."""
    with live(folder, local_config(request.param, inflight=min(2, request.param))) as front:
        yield front


def test_against_transformers(front: Front, folder: Path) -> None:
    """Alone, then joining while others decode: right both times, and the same bits."""
    alone = [front.generate([prompt], MAX_TOKENS, WITH_LOGITS)[0] for prompt in PROMPTS]
    mixed = _in_mixed_batches(front)
    for prompt, single, joined in zip(PROMPTS, alone, mixed, strict=True):
        expected = transformers_logits(folder, [*prompt, *single.tokens[:-1]])
        assert single.tokens == expected[len(prompt) - 1 :].argmax(-1).tolist()
        np.testing.assert_allclose(_logits(single), expected, atol=TOLERANCE, rtol=0)
        assert joined.tokens == single.tokens
        np.testing.assert_array_equal(_logits(joined), _logits(single))


def test_batches_were_mixed(front: Front) -> None:
    """The batches of the test before did hold initiations beside increments."""
    before = len(front.trace())
    _in_mixed_batches(front)
    lengths = [plan.lengths for plan in front.trace()[before:]]
    assert any(1 in both and max(both) > 1 for both in lengths)


def _in_mixed_batches(front: Front) -> list[Answer]:
    first = [front.submit(prompt, MAX_TOKENS, WITH_LOGITS) for prompt in PROMPTS[:2]]
    front.wait(first, num_tokens=3)
    rest = [front.submit(prompt, MAX_TOKENS, WITH_LOGITS) for prompt in PROMPTS[2:]]
    return front.wait(first + rest)


def _logits(answer: Answer) -> np.ndarray:
    return answer.logits(LOUD_VOCAB_SIZE)


def transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """What transformers computes for every position of `ids`, [T, V]."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()
