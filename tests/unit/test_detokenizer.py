"""Incremental text: whole characters, no U+FFFD that isn't final, nothing lost or repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from orca_dist.text import Detokenizer, Tokenizer
from tests.fixtures.byte_level import byte_level_tokenizer, tokens
from tests.fixtures.checkpoints import (
    BANG,
    BYTE_VOCAB_SIZE,
    EOS,
    FIRST_BYTE,
    HELLO,
    WORLD,
    byte_ids,
    byte_tokenizer,
    letter,
)

REPLACEMENT = "\ufffd"
EMOJI, CJK, E_ACUTE = "\U0001f642", "\u4e2d", "\u00e9"
SPACE_PIECE = "\u2581"  # a space to Llama 2's pieces: it comes back as one


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-fallback pieces, as Llama 2's."""
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("fallback")))


@pytest.fixture(scope="module")
def level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_tokenizer(tmp_path_factory.mktemp("level"))


@pytest.fixture(scope="module")
def level(level_folder: Path) -> Tokenizer:
    """Byte-level pieces, as Llama 3's."""
    return Tokenizer.load(level_folder)


def one_by_one(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The chunk of each token, then the flush."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


def raw(byte: int) -> int:
    return FIRST_BYTE + byte


def test_characters_arrive_whole_and_as_soon_as_they_are_complete(fallback: Tokenizer) -> None:
    ids = [HELLO, *byte_ids(EMOJI), BANG, *byte_ids(CJK), *byte_ids(E_ACUTE), EOS]
    want = ["Hello", "", "", "", EMOJI, "!", "", "", CJK, "", E_ACUTE, "", ""]
    assert one_by_one(fallback, ids) == want


def test_spaces_between_words_stay(fallback: Tokenizer) -> None:
    assert one_by_one(fallback, [HELLO, WORLD, BANG]) == ["Hello", " world", "!", ""]


def test_only_the_first_token_of_the_answer_loses_its_space(fallback: Tokenizer) -> None:
    detokenizer = Detokenizer(fallback)
    assert detokenizer.push([]) == ""
    assert detokenizer.push([EOS]) == ""  # special: not the first token of the text
    assert detokenizer.push([HELLO, HELLO]) == "Hello Hello"
    assert detokenizer.push([HELLO]) == " Hello"


def test_a_special_token_inside_a_character_is_skipped(fallback: Tokenizer) -> None:
    first, *rest = byte_ids(CJK)
    assert one_by_one(fallback, [first, EOS, *rest]) == ["", "", "", CJK, ""]


def test_a_character_that_never_completes_comes_at_the_end(fallback: Tokenizer) -> None:
    ids = [HELLO, *byte_ids(EMOJI)[:3]]
    assert one_by_one(fallback, ids) == ["Hello", "", "", "", REPLACEMENT * 3]


def test_a_character_cut_off_by_a_letter_is_replaced_before_it(fallback: Tokenizer) -> None:
    ids = [*byte_ids(CJK), raw(0xF0), raw(0x9F), letter("a")]
    assert one_by_one(fallback, ids) == ["", "", CJK, "", "", REPLACEMENT * 2 + "a", ""]


@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xF0, 0xC3])
def test_invalid_runs_are_never_held_back(fallback: Tokenizer, byte: int) -> None:
    """At most one character's bytes are open, however long the run."""
    detokenizer = Detokenizer(fallback)
    sent = 0
    for count in range(1, 2001):
        sent += len(detokenizer.push([raw(byte)]))
        assert sent >= count - 3
    assert sent + len(detokenizer.flush()) == 2000


def test_a_genuine_replacement_character_passes(fallback: Tokenizer, level: Tokenizer) -> None:
    assert "".join(one_by_one(fallback, byte_ids(REPLACEMENT))) == REPLACEMENT
    assert one_by_one(level, level.encode(REPLACEMENT)) == ["", "", REPLACEMENT, ""]


def test_ids_beyond_the_vocabulary_have_no_text(fallback: Tokenizer) -> None:
    padded = BYTE_VOCAB_SIZE + 2
    assert "".join(one_by_one(fallback, [padded, HELLO, padded, WORLD])) == "Hello world"


@given(ids=st.lists(st.integers(0, BYTE_VOCAB_SIZE + 4)), cuts=st.lists(st.integers(0, 40)))
def test_chunks_join_to_decode_with_byte_fallback(
    fallback: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert joined(fallback, ids, cuts) == fallback.decode(ids)


@pytest.fixture(scope="module")
def level_library(level_folder: Path) -> tokenizers.Tokenizer:
    assert len(tokens()) == 265
    return tokenizers.Tokenizer.from_file(str(level_folder / "tokenizer.json"))


@given(ids=st.lists(st.integers(0, 264)), cuts=st.lists(st.integers(0, 40)))
def test_chunks_join_to_the_librarys_decode_with_byte_level(
    level: Tokenizer, level_library: tokenizers.Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert joined(level, ids, cuts) == level.decode(ids) == level_library.decode(ids)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters=SPACE_PIECE)))
def test_text_streams_without_replacements(
    fallback: Tokenizer, level: Tokenizer, text: str
) -> None:
    for tokenizer in (fallback, level):
        chunks = one_by_one(tokenizer, tokenizer.encode(text))
        assert "".join(chunks) == text
        assert sum(REPLACEMENT in chunk for chunk in chunks) == text.count(REPLACEMENT)


def joined(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> str:
    """The chunks of `ids`, pushed in parts of the lengths `cuts`."""
    detokenizer, parts = Detokenizer(tokenizer), []
    for cut in cuts:
        parts.append(detokenizer.push(ids[:cut]))
        ids = ids[cut:]
    return "".join([*parts, detokenizer.push(ids), detokenizer.flush()])
