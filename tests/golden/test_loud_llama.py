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
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config

PROMPTS = [[5, 9, 17], [300], list(range(40, 77)), [7, 7, 7, 7, 7], list(range(100, 220))]
MAX_TOKENS = 24
VOCAB = 320
TOLERANCE = 1e-4
WITH_LOGITS = Sampling(return_logits=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loud")
    loud_llama(folder)
    return folder


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[tuple[list[int], np.ndarray]]:
    """Greedy tokens, and the logits of every position that leads to one."""
    return [_truth(folder, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def front(folder: Path, request: pytest.FixtureRequest) -> Iterator[Front]:
    with live(folder, local_config(request.param)) as front:
        yield front


def test_alone(front: Front, truth: list[tuple[list[int], np.ndarray]]) -> None:
    for prompt, (tokens, logits) in zip(PROMPTS, truth, strict=True):
        (answer,) = front.generate([prompt], MAX_TOKENS, WITH_LOGITS)
        assert answer.tokens == tokens
        np.testing.assert_allclose(answer.logits(VOCAB), logits, atol=TOLERANCE, rtol=0)


def test_in_mixed_batches(front: Front, truth: list[tuple[list[int], np.ndarray]]) -> None:
    """Requests join while others decode; their bits don't notice."""
    alone = [front.generate([prompt], MAX_TOKENS, WITH_LOGITS)[0] for prompt in PROMPTS]
    first = [front.submit(prompt, MAX_TOKENS, WITH_LOGITS) for prompt in PROMPTS[:2]]
    front.wait(first, num_tokens=3)
    rest = [front.submit(prompt, MAX_TOKENS, WITH_LOGITS) for prompt in PROMPTS[2:]]
    answers = front.wait(first + rest)
    for answer, single, (tokens, logits) in zip(answers, alone, truth, strict=True):
        assert answer.tokens == tokens
        np.testing.assert_allclose(answer.logits(VOCAB), logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(answer.logits(VOCAB), single.logits(VOCAB))


def _truth(folder: Path, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            logits = model(torch.tensor([ids])).logits[0]
            ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], logits.numpy()
