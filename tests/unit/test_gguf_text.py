"""Tokenizers rebuilt from GGUF files give the tokens of those that the files were made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_dist.errors import ModelError
from orca_dist.text import Detokenizer, Tokenizer
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.gguf_text import write_tokenizer
from tests.fixtures import byte_level, sentencepieces
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.ggufs import llama_gguf
from tests.fixtures.sentencepieces import CHAT_MARK, TOKENS, reference_ids

TEXTS = [
    "the 1212 then 12345678",
    "I'll CAN'T they'Ve x",
    "tabs\t\tand   spaces \n\n  lines\r\n end  ",
    "(how)...\n\n!!how?\u00bd\u0663 \u4e2d\u6587\u3002 caf\u00e9 \U0001f642",
    " the", "", " ", "\n",
]  # fmt: skip
LLAMA_3, QWEN_2 = {"tokenizer.ggml.pre": "llama-bpe"}, {"tokenizer.ggml.pre": "qwen2"}
SPACES_KEPT = sentencepieces.metadata(add_space_prefix=False)
GIVEN_TEXTS = st.text(alphabet="thelo inu12.\u00e9\u4e2d\u2581\U0001f642\n", max_size=24)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("plain"), num_layers=1, tie=True)


@pytest.fixture(scope="module")
def sentencepiece(place: Path) -> Tokenizer:
    return rebuilt(place, sentencepieces.metadata())


@pytest.fixture(scope="module")
def without_prefix(place: Path) -> Tokenizer:
    return rebuilt(place, SPACES_KEPT)


def rebuilt(place: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Ours, of a GGUF file with `metadata`; the file stays as m.gguf in `place`."""
    source = GgufFile(llama_gguf(place / "m.gguf", place, metadata=metadata))
    write_tokenizer(source, place, max_model_len=256)
    return Tokenizer.load(place)


def transformers_own(place: Path) -> Any:
    """What transformers makes of the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, gguf_file="m.gguf")


def test_llama_3_is_as_transformers_reads_it(place: Path) -> None:
    ours = rebuilt(place, {**LLAMA_3, "tokenizer.ggml.add_bos_token": False})
    theirs = transformers_own(place)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text


def test_qwen_2_is_as_transformers_own_class(place: Path) -> None:
    from transformers import Qwen2Tokenizer

    ours = rebuilt(place, QWEN_2)
    vocab = {token: index for index, token in enumerate(byte_level.tokens())}
    merges = [tuple(merge.split(" ")) for merge in byte_level.MERGES]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
    for text in [*TEXTS, "cafe\u0301"]:
        assert ours.encode(text) == theirs.encode(text), text


def test_each_rule_has_its_own_numbers(place: Path) -> None:
    """The merge of 1 and 2 applies in "912" where three digits stay together only."""
    joined = byte_level.tokens().index("12")
    numbers = {rule: rebuilt(place, {"tokenizer.ggml.pre": rule}) for rule in ("qwen2", "smollm")}
    assert all(joined not in tokenizer.encode("912") for tokenizer in numbers.values())
    llama_3 = rebuilt(place, LLAMA_3)
    assert joined in llama_3.encode("912")
    assert joined not in llama_3.encode("9912")  # 991 and 2


def test_llama_3_takes_whole_words_without_merges(place: Path) -> None:
    """ "how" can't be reached: only o and w have a merge."""
    words = {"tokenizer.ggml.tokens": [*byte_level.tokens(), "how"]}
    types = {"tokenizer.ggml.token_type": [3] * 3 + [1] * 263}
    whole = rebuilt(place, {**LLAMA_3, **words, **types}).encode("how", add_special_tokens=False)
    parts = rebuilt(place, {**QWEN_2, **words, **types}).encode("how", add_special_tokens=False)
    assert (whole, len(parts)) == ([265], 2)


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        (LLAMA_3, [1]),
        ({**LLAMA_3, "tokenizer.ggml.add_bos_token": False}, []),
        (QWEN_2, []),
        (sentencepieces.metadata(), [1]),
        (sentencepieces.metadata(add_bos_token=False), []),
        (sentencepieces.metadata(add_eos_token=True), [1, 2]),
    ],
)
def test_a_silent_file_means_the_habit_of_its_kind(
    place: Path, metadata: dict[str, Any], want: list[int]
) -> None:
    assert rebuilt(place, metadata).encode("") == want


@given(text=GIVEN_TEXTS)
def test_sentencepiece_joins_by_score(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.encode(text, add_special_tokens=False) == reference_ids(text)


@given(text=GIVEN_TEXTS)
def test_a_space_is_put_before_only_where_the_file_says(
    without_prefix: Tokenizer, text: str
) -> None:
    ids = without_prefix.encode(text, add_special_tokens=False)
    assert ids == reference_ids(text, prefix=False)


@pytest.mark.parametrize("metadata", [sentencepieces.metadata(), SPACES_KEPT])
def test_sentencepiece_gives_the_text_back(place: Path, metadata: dict[str, Any]) -> None:
    tokenizer = rebuilt(place, metadata)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer)
        streamed = "".join(stream.push([token]) for token in ids) + stream.flush()
        assert streamed == tokenizer.decode(ids) == text


def test_sentencepiece_is_as_transformers_reads_it(place: Path) -> None:
    """But for leading spaces, which its class drops one of and sentencepiece keeps."""
    ours = rebuilt(place, sentencepieces.metadata())
    theirs = transformers_own(place)
    for text in ("hello the hell in", "the  12  \u00e9tu\u00e9", "\U0001f642 lo", "a</s>"):
        assert ours.encode(text) == theirs.encode(text), text


def test_special_tokens_are_matched_in_sentencepiece_text(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode(f"lo</s>lo{CHAT_MARK}<unk>", add_special_tokens=False)
    lo, mark = reference_ids("lo"), TOKENS.index(CHAT_MARK)
    assert ids == [*lo, 2, *lo, mark, 0]
    assert sentencepiece.special_ids == {0, 1, 2}
    assert sentencepiece.decode([mark]) == CHAT_MARK


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scores": None}, r"tokenizer\.ggml\.scores is missing"),
        ({"scores": [0.0]}, r"\d+ tokens have 1 scores"),
        ({"tokens": [t.replace("<0x0A>", "<nl>") for t in TOKENS]}, r"no token for byte 0x0A"),
        ({"tokens": [t if t != "2" else "x" for t in TOKENS]}, r"the piece '12' has a character"),
        ({"remove_extra_whitespaces": True}, r"remove_extra_whitespaces is not supported"),
        ({"precompiled_charsmap": [1, 2]}, r"precompiled_charsmap is not supported"),
        ({"model": "bert"}, r"model = 'bert' is not supported; supported: gpt2, llama"),
        ({"model": "gpt2", "pre": "tekken"}, r"pre = 'tekken'.*: smollm, gpt-2, llama-bpe, qwen2"),
    ],
)
def test_what_would_give_other_tokens_is_refused(
    place: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        rebuilt(place, sentencepieces.metadata(**changes))
