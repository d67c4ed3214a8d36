"""The default model's real weights: 32 greedy tokens equal transformers' on 2 and 3 stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orca_dist.text import ChatTemplate, Tokenizer
from tests.fixtures.live import Front, live, local_config
from tests.fixtures.models import smollm2_folder  # noqa: F401  a fixture

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain what a pipeline is, in one sentence.",
    "List three colours.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 3?",
    "Name a famous scientist and say why.",
]
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> list[list[int]]:  # noqa: F811
    tokenizer, chat = Tokenizer.load(smollm2_folder), ChatTemplate.load(smollm2_folder)
    texts = [chat.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def front(smollm2_folder: Path, request: pytest.FixtureRequest) -> Iterator[Front]:  # noqa: F811
    with live(smollm2_folder, local_config(request.param)) as front:
        yield front


def test_greedy_tokens(
    front: Front,
    prompts: list[list[int]],
    smollm2_folder: Path,  # noqa: F811
) -> None:
    """Each token is transformers' likeliest after the prompt and the tokens before it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    answers = front.generate(prompts, MAX_TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.tokens[:-1]])).logits[0]
        assert len(answer.tokens) == MAX_TOKENS
        assert answer.tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
