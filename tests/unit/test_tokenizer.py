"""Tokenizer: ids of text, text of ids, every way a folder names its ends of text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from orca_dist.errors import InvalidRequest, ModelError
from orca_dist.text import Tokenizer
from tests.fixtures.checkpoints import BYTE_VOCAB_SIZE, EOS, HELLO, byte_ids, byte_tokenizer, letter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path)


def write(folder: Path, name: str, document: Any) -> None:
    (folder / name).write_text(json.dumps(document), encoding="utf-8")


def test_eos_is_the_union_of_all_three_files(folder: Path) -> None:
    write(folder, "config.json", {"eos_token_id": [5]})
    write(folder, "generation_config.json", {"eos_token_id": [2, 70]})
    write(folder, "tokenizer_config.json", {"eos_token": "!"})
    assert Tokenizer.load(folder).eos_token_ids == {5, 2, 70, 262}


def test_eos_token_may_be_a_mapping(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "</s>", "lstrip": False}})
    assert Tokenizer.load(folder).eos_token_ids == {EOS}


@pytest.mark.parametrize("entry", [None, "<gone>"])
def test_no_eos_at_all(folder: Path, entry: str | None) -> None:
    write(folder, "config.json", {"eos_token_id": None})
    write(folder, "tokenizer_config.json", {"eos_token": entry})
    assert Tokenizer.load(folder).eos_token_ids == frozenset()


def test_sizes_and_specials(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == tokenizer.num_ids == BYTE_VOCAB_SIZE
    assert tokenizer.special_ids == {0, 1, 2}


def test_special_tokens_are_added_only_when_asked(folder: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("A") == [1, 259, letter("A")]
    assert tokenizer.encode("A", add_special_tokens=False) == [259, letter("A")]


def test_training_settings_in_the_file_are_off(folder: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(max_length=2)
    library.enable_padding(length=8)
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert len(tokenizer.encode("ABCD")) == 5
    assert len(tokenizer.encode("")) == 0


def test_text_that_is_not_unicode_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"text: is not valid Unicode at character 2"):
        Tokenizer.load(folder).encode("ab\ud800")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer: needs tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "None"}}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"generation_config\.json can't be read"):
        Tokenizer.load(folder)


def test_decode_keeps_whole_characters_beside_broken_ones(folder: Path) -> None:
    """The library drops both: a stream has sent the whole one by then."""
    ids = [HELLO, *byte_ids("\u4e2d"), 258, HELLO]
    assert Tokenizer.load(folder).decode(ids) == "Hello\u4e2d\ufffd Hello"


def test_special_tokens_can_be_shown(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode([1, HELLO, 2]) == "Hello"
    assert tokenizer.decode([1, HELLO, 2], skip_special_tokens=False) == "<s> Hello</s>"


VOCAB = {"<unk>": 0, "\u2581the": 1, "\u2581": 2, "a": 3, "##b": 4, "\u00e9": 5, "<0x41>": 6}
DECODERS = {
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]),
    "none": None,
}


@pytest.fixture(scope="module", params=DECODERS)
def other_kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours and the library's, of the same file."""
    library = tokenizers.Tokenizer(models.WordLevel(vocab=VOCAB, unk_token="<unk>"))
    if DECODERS[request.param] is not None:
        library.decoder = DECODERS[request.param]
    path = tmp_path_factory.mktemp("other") / "tokenizer.json"
    library.save(str(path))
    return Tokenizer.load(path.parent), tokenizers.Tokenizer.from_file(str(path))


@given(ids=st.lists(st.integers(0, 6), max_size=8))
def test_other_decoders_give_the_librarys_text(
    other_kind: tuple[Tokenizer, tokenizers.Tokenizer], ids: list[int]
) -> None:
    ours, library = other_kind
    assert ours.decode(ids) == library.decode(ids)


def test_text_needs_no_torch() -> None:
    code = "import sys, orca_dist.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
