"""Tokenizers without tokenizer.json give transformers' ids, or are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from orca_dist.errors import ModelError
from orca_dist.text import Detokenizer, Tokenizer

# tokenizer.model: trained by sentencepiece 0.2.3 (BPE, byte fallback, text left as it is) on this
# project's pages; ids.json: those of transformers 5.24 with that file, which needs sentencepiece.
MADE = Path(__file__).resolve().parents[1] / "fixtures" / "sentencepiece_model"
TEXTS: list[str] = json.loads((MADE / "texts.json").read_text(encoding="utf-8"))
IDS: dict[str, list[list[int]]] = json.loads((MADE / "ids.json").read_text(encoding="utf-8"))
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
CHAT_MARK = {"content": "<|im_end|>", "special": True, "normalized": False}


def write(folder: Path, name: str, document: Any) -> None:
    (folder / name).write_text(json.dumps(document), encoding="utf-8")


def pieces_folder(folder: Path, **settings: Any) -> Path:
    shutil.copy(MADE / "tokenizer.model", folder)
    write(folder, "tokenizer_config.json", {**LLAMA, **settings})
    write(folder, "config.json", {"model_type": "llama", "eos_token_id": 2})
    return folder


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """A byte-level vocabulary with merges, as tokenizer.json has them."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 3, trainer)
    return dict(json.loads(library.to_str())["model"])


def vocabulary_folder(folder: Path, trained: dict[str, Any], **settings: Any) -> Path:
    lines = ["#version: 0.2", *(" ".join(pair) for pair in trained["merges"]), ""]
    write(folder, "vocab.json", trained["vocab"])
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    write(folder, "tokenizer_config.json", settings)
    return folder


def by_transformers(folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer(text)["input_ids"])


# ---- sentencepiece -----------------------------------------------------


@pytest.mark.parametrize(("legacy", "whose"), [(False, ""), (True, ", legacy")])
def test_pieces_give_transformers_ids(tmp_path: Path, legacy: bool, whose: str) -> None:
    tokenizer = Tokenizer.load(pieces_folder(tmp_path, legacy=legacy))
    assert [tokenizer.encode(text) for text in TEXTS] == IDS[f"transformers{whose}"]


def test_the_first_token_is_the_beginning_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    told = Tokenizer.load(pieces_folder(tmp_path / "other", add_bos_token=False))
    tokenizer = Tokenizer.load(pieces_folder(tmp_path))
    assert tokenizer.encode("a") == [1, *told.encode("a")]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_text_back(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(pieces_folder(tmp_path, legacy=True))
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert streamed == tokenizer.decode(ids)
    if "<" not in text and "[" not in text and not text.startswith(("▁", " ")):
        assert streamed == text.replace("▁", " ")


def test_tokens_may_be_added_behind_the_pieces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(
        pieces_folder(tmp_path, added_tokens_decoder={"700": CHAT_MARK}, eos_token="<|im_end|>")
    )
    assert tokenizer.encode("a<|im_end|>")[-1] == 700
    assert 700 in tokenizer.special_ids
    assert tokenizer.eos_token_ids == {2, 700}


def test_an_added_token_at_an_impossible_id_is_refused(tmp_path: Path) -> None:
    folder = pieces_folder(tmp_path, added_tokens_decoder={"701": CHAT_MARK})
    with pytest.raises(ModelError, match=r"'<\|im_end\|>' can't have the id 701"):
        Tokenizer.load(folder)


def field(number: int, payload: bytes) -> bytes:
    """Of protobuf's wire format: a length and its bytes."""
    return bytes([number << 3 | 2, len(payload)]) + payload


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x0a\xff cut", "is not sentencepiece's"),
        (b"IQ== 0\nIg== 1\n" * 9, r"tokenizer\.model"),  # tiktoken's
        (b"", "holds no pieces"),
        (field(1, field(1, b"a")) + field(2, b"\x18\x04"), "model_type 4 is not supported"),
        (field(1, field(1, b"a")) + field(2, b"\x18\x02"), "its normalizer changes the text"),
        (
            field(1, field(1, b"a")) + field(2, b"\x18\x02") + field(3, b"\x20\x00"),
            "no token for byte 0x00",
        ),
    ],
)
def test_other_pieces_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    folder = pieces_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        Tokenizer.load(folder)
    assert "tokenizer.model" in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- vocabulary and merges ---------------------------------------------


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_vocabulary_gives_transformers_ids(
    tmp_path: Path, trained: dict[str, Any], name: str
) -> None:
    mark = len(trained["vocab"])
    settings = {
        "tokenizer_class": name,
        "added_tokens_decoder": {
            "0": {**CHAT_MARK, "content": "<|endoftext|>"},
            str(mark): CHAT_MARK,
        },
        "eos_token": "<|im_end|>",
        "bos_token": None,
    }
    folder = vocabulary_folder(tmp_path, trained, **settings)
    write(folder, "config.json", {"model_type": name.removesuffix("Tokenizer").lower()})
    tokenizer, theirs = Tokenizer.load(folder), by_transformers(folder)
    for text in [*TEXTS, "a<|im_end|>b", "<|endoftext|>", "É É"]:
        assert tokenizer.encode(text) == theirs(text), text
        assert tokenizer.decode(tokenizer.encode(text)) is not None
    assert tokenizer.eos_token_ids == {mark}
    assert tokenizer.special_ids >= {0, mark}


def test_a_family_names_its_class(tmp_path: Path, trained: dict[str, Any]) -> None:
    folder = vocabulary_folder(tmp_path, trained)
    with pytest.raises(ModelError, match=r"tokenizer_class = none can't be built.*GPT2Tokenizer"):
        Tokenizer.load(folder)
    write(folder, "config.json", {"model_type": "qwen3"})
    assert Tokenizer.load(folder).encode("hi")


def test_another_class_is_refused(tmp_path: Path, trained: dict[str, Any]) -> None:
    folder = vocabulary_folder(tmp_path, trained, tokenizer_class="RobertaTokenizer")
    with pytest.raises(ModelError, match="tokenizer_class = RobertaTokenizer can't be built"):
        Tokenizer.load(folder)


def test_files_of_different_tokenizers_are_refused(tmp_path: Path, trained: dict[str, Any]) -> None:
    folder = vocabulary_folder(tmp_path, trained, tokenizer_class="GPT2Tokenizer")
    (folder / "merges.txt").write_text("q zz\n")
    with pytest.raises(ModelError, match=r"'zz' is not in vocab\.json"):
        Tokenizer.load(folder)
    (folder / "merges.txt").write_text("a b c\n")
    with pytest.raises(ModelError, match=r"'a b c' is not two pieces"):
        Tokenizer.load(folder)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer: needs tokenizer\.json, tokenizer\.m"):
        Tokenizer.load(tmp_path)
