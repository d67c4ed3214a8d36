"""A chat goes on: what the first turn has computed isn't computed again, unless told so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_dist import SamplingParams
from orca_dist.client.results import Completion
from tests.fixtures.checkpoints import byte_tokenizer, letter, loud_llama, script_llama
from tests.fixtures.live import local_config
from tests.fixtures.served import Served, served

BLOCK_SIZE = 16
FIRST = [(13 * i + 5) % 320 for i in range(150)]
MORE = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)
TEMPLATE = "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}{% endfor %}A"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"), max_model_len=512)


@pytest.fixture(scope="module", params=["on", pytest.param("off", marks=pytest.mark.slow)])
def turns(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with served(folder, local_config(2, prefix_cache=request.param)) as server:
        yield request.param, server


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[int, ...]:
    """The second turn's tokens where nothing is ever shared, on one stage."""
    with served(folder, local_config(1, memory="reserve")) as server, server.client() as client:
        first = client.generate(FIRST, PARAMS)
        return client.generate([*FIRST, *first.token_ids, *MORE], PARAMS).token_ids


def test_only_the_rest_is_computed(turns: tuple[str, Served], expected: tuple[int, ...]) -> None:
    prefix_cache, server = turns
    with server.client() as client:
        first = client.generate(FIRST, PARAMS)
        num_before = len(server.plans())
        prompt = [*FIRST, *first.token_ids, *MORE]
        second = client.generate(prompt, PARAMS)
    in_blocks = (len(FIRST) + 29) // BLOCK_SIZE * BLOCK_SIZE  # the 30th token was not fed back
    cached = in_blocks if prefix_cache == "on" else 0
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == cached
    assert _computed(server, num_before) == [len(prompt) - cached] + [1] * 29
    assert second.token_ids == expected


def test_the_same_prompt_again_computes_its_last_block(turns: tuple[str, Served]) -> None:
    """Its last token has to be, as it samples: of whole blocks, all but the last are found."""
    prefix_cache, server = turns
    prompt = [*range(100, 100 + 5 * BLOCK_SIZE)]
    with server.client() as client:
        first = client.generate(prompt, PARAMS)
        again = client.generate(prompt, PARAMS)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == (4 * BLOCK_SIZE if prefix_cache == "on" else 0)


def _computed(server: Served, num_before: int) -> list[int]:
    """Tokens of each plan since then."""
    return [sum(plan.lengths) for plan in server.plans()[num_before:]]


def test_a_chat_in_messages(tmp_path: Path) -> None:
    """Template and tokenizer give the second turn the first one's tokens to begin with."""
    script_llama(tmp_path, next_of=lambda token: max(letter("A"), token + 1) % letter("z"))
    byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "b" * 40}]
    with served(tmp_path, local_config(2)) as server, server.client() as client:
        answer = client.generate(messages, SamplingParams(max_tokens=10))
        messages += [{"role": "assistant", "content": answer.text}]
        messages += [{"role": "user", "content": "c"}]
        second = client.generate(messages, SamplingParams(max_tokens=3))
    assert answer.text == "BCDEFGHIJK"
    assert second.text == "BCD"
    _check_chat(answer, second)


def _check_chat(answer: Completion, second: Completion) -> None:
    """_Ubb...bA and the answer but its last token are in three whole blocks."""
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (43, 0)
    assert second.usage.prompt_tokens == 43 + 10 + 3
    assert second.usage.cached_tokens == (43 + 9) // BLOCK_SIZE * BLOCK_SIZE
