"""A head with rows beyond the tokenizer's ids, on a live pipeline: no such id ever comes out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_dist import LLM, SamplingParams
from tests.fixtures.checkpoints import BYTE_VOCAB_SIZE, FIRST_LETTER
from tests.fixtures.live import live, local_config
from tests.fixtures.padded_head import PADDED, VOCAB, padded_llama
from tests.fixtures.served import served

PROMPT = [FIRST_LETTER]
LETTERS = [FIRST_LETTER + 1 + i for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return padded_llama(tmp_path_factory.mktemp("padded"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, config=local_config(2)) as llm:
        yield llm


def test_greedy_takes_the_best_id_that_has_a_text(llm: LLM) -> None:
    (answer,) = llm.generate([PROMPT], SamplingParams(max_tokens=8))
    assert answer.token_ids == LETTERS
    assert answer.text == "BCDEFGHI"


def test_sampling_never_takes_one_without_a_text(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=40, temperature=1.5, seed=seed) for seed in range(5)]
    answers = llm.generate([PROMPT] * 5, params)
    tokens = [token for answer in answers for token in answer.token_ids]
    assert len(set(tokens)) > 20
    assert max(tokens) < BYTE_VOCAB_SIZE


def test_logits_stay_as_computed(llm: LLM) -> None:
    (answer,) = llm.generate([PROMPT], SamplingParams(max_tokens=4, return_logits=True))
    assert answer.token_ids == LETTERS[:4]
    assert answer.logits is not None
    assert answer.logits.shape == (4, VOCAB)
    assert answer.logits.argmax(axis=1).tolist() == [PADDED] * 4


def test_the_server_does_the_same(folder: Path) -> None:
    with served(folder, local_config(1)) as server, server.client() as client:
        answer = client.generate(PROMPT, SamplingParams(max_tokens=8))
    assert list(answer.token_ids) == LETTERS


def test_without_the_tokenizers_word_the_engine_takes_any_id(folder: Path) -> None:
    with live(folder, local_config(1)) as front:
        (answer,) = front.generate([PROMPT], 3)
    assert answer.tokens == [PADDED] * 3
