"""The demo model's converted folder: transformers reads from it what we read."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.spec import load_spec
from orca_dist.text import ChatTemplate, Detokenizer, Tokenizer
from orca_dist.weights import check_folder, describe
from tests.fixtures.models import smollm2_folder  # noqa: F401  a fixture

TEXTS = [
    "Hello, world!",
    "  two leading spaces, one trailing ",
    "\n\n\nnewlines\r\n\tand tabs\n",
    "1234567890 and 3.14159e-10, 2026-11-29",
    "\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 emoji \U0001f1eb\U0001f1f7",
    "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "caf\u00e9 na\u00efve cafe\u0301 \u0635\u0628\u0627\u062d \u05e9\u05dc\u05d5\u05dd",
    "don't I'LL we've <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # code",
    "<repo_name>a/b<file_sep>c \u0000 \ufffd \u00ad \u0120",
    "",
]
CHAT = [
    {"role": "user", "content": "What is 12 times 3?"},
    {"role": "assistant", "content": "36."},
    {"role": "user", "content": "Thanks  \U0001f642\n"},
]


@pytest.fixture(scope="module")
def ours(smollm2_folder: Path) -> Tokenizer:  # noqa: F811
    return Tokenizer.load(smollm2_folder)


@pytest.fixture(scope="module")
def theirs(smollm2_folder: Path):  # noqa: F811
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(ours: Tokenizer, theirs, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.decode(ids, skip_special_tokens=False) == text == theirs.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(ours: Tokenizer, text: str) -> None:
    ids, detokenizer = ours.encode(text), Detokenizer(ours)
    chunks = [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]
    assert "".join(chunks) == ours.decode(ids)
    assert sum("\ufffd" in chunk for chunk in chunks) == text.count("\ufffd")


def test_digits_are_split_one_by_one(ours: Tokenizer) -> None:
    assert [ours.decode([token]) for token in ours.encode("2026")] == list("2026")


@pytest.mark.parametrize("messages", [CHAT, CHAT[:1], [{"role": "system", "content": "x"}, *CHAT]])
def test_the_chat_is_rendered_as_by_transformers(
    smollm2_folder: Path,  # noqa: F811
    theirs,
    messages: list[dict[str, str]],
) -> None:
    chat = ChatTemplate.load(smollm2_folder)
    for prompt in (True, False):
        want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert chat.render(messages, add_generation_prompt=prompt) == want


def test_ends_and_sizes(ours: Tokenizer, theirs, smollm2_folder: Path) -> None:  # noqa: F811
    assert (ours.eos_token_ids, ours.vocab_size) == ({2}, 49152)
    assert ours.special_ids == set(theirs.all_special_ids) | set(range(17))
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)


def test_the_folder_is_whole_and_keeps_its_licence(smollm2_folder: Path) -> None:  # noqa: F811
    spec = load_spec(smollm2_folder)
    check_folder(smollm2_folder, spec)
    facts = describe(smollm2_folder)
    assert facts["parameters"] == 134_515_008
    assert facts["tensors_by_dtype"] == {"BF16": 272}
    assert "Apache License" in (smollm2_folder / "LICENSE").read_text(encoding="utf-8")


def test_a_greedy_answer_is_sensible(ours: Tokenizer, smollm2_folder: Path) -> None:  # noqa: F811
    """A folder with wrongly ordered rows still loads, and babbles."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ours.encode(
        ChatTemplate.load(smollm2_folder).render(question), add_special_tokens=False
    )
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
    assert "Paris" in ours.decode(ids[len(prompt) :].tolist())
