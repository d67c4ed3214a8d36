"""tokenizer.model of the unigram type gives sentencepiece's ids, and so transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from orca_dist.errors import ModelError
from orca_dist.text import Detokenizer, Tokenizer
from orca_dist.text.piece_model import PieceModel, Segmentation
from orca_dist.text.unigram import unigram_tokenizer
from orca_dist.weights.sentencepiece import SentencePieces, TokenType

# bytes.model: trained by sentencepiece 0.2.3 on this project's pages, with byte fallback and text
# left as it is. normalised.model: without bytes, with rules for spelling and spaces trimmed.
# ids.json: sentencepiece's own ids, and those of transformers 5.24 (which needs sentencepiece) with
# "tokenizer_class": "TokenizersBackend": its LlamaTokenizer takes any such file for BPE.
MADE = Path(__file__).resolve().parents[1] / "fixtures" / "unigram_model"
TEXTS: list[str] = json.loads((MADE / "texts.json").read_text(encoding="utf-8"))
IDS: dict[str, list[list[int]]] = json.loads((MADE / "ids.json").read_text(encoding="utf-8"))
MODELS = ["bytes", "normalised"]
BYTE_SPELLED = "<0x4"  # transformers takes it for a byte, sentencepiece for text


def folder_of(folder: Path, model: str, **settings: Any) -> Path:
    shutil.copy(MADE / f"{model}.model", folder / "tokenizer.model")
    document = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_ids_are_sentencepieces_own(tmp_path: Path, model: str) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, model))
    for text, ids in zip(TEXTS, IDS[f"sentencepiece, {model}"], strict=True):
        if "<s>" not in text:  # which it takes for text, and transformers for the token
            assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("legacy", "whose"), [(True, ", legacy"), (False, "")])
def test_ids_are_those_of_transformers(
    tmp_path: Path, model: str, legacy: bool, whose: str
) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, model, legacy=legacy))
    for text, ids in zip(TEXTS, IDS[f"transformers, {model}{whose}"], strict=True):
        if BYTE_SPELLED not in text:
            assert tokenizer.encode(text) == ids, text


def test_the_two_models_differ_in_what_they_do_to_text(tmp_path: Path) -> None:
    """So that neither test above could pass with the rules left out."""
    kept, changed = (IDS[f"sentencepiece, {model}"] for model in MODELS)
    same = TEXTS.index("\uff21\uff22\uff43 \ufb01n"), TEXTS.index("  two   spaces  ")
    assert all(len(kept[index]) > len(changed[index]) for index in same)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_text_back(tmp_path: Path, model: str, text: str) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, model))
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert streamed == tokenizer.decode(ids)
    if model == "bytes" and "s>" not in text:
        assert streamed == text.replace("▁", " ")


def test_special_tokens_and_the_first_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, "bytes", add_bos_token=None))
    told = tokenizer.encode("a</s>")
    assert (told[0], told[-1]) == (1, 2)
    assert 1 not in tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {2}


def test_an_unknown_character_has_the_unknown_id_and_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, "normalised"))
    ids = tokenizer.encode("a\N{WHALE}b")
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize("alphabet", ["<0x41>", "0x41>", "<0x41"])
def test_text_that_names_a_byte_is_text(alphabet: str) -> None:
    """Whether its characters have pieces, or some are spelled in bytes themselves."""
    names = {f"<0x{byte:02X}>": (0.0, TokenType.BYTE) for byte in range(256)}
    letters = dict.fromkeys(("▁", *alphabet), (-9.0, TokenType.NORMAL))
    tokenizer = made_of({**names, **letters}, byte_fallback=True)
    spelled = [c if c in alphabet else f"<0x{ord(c):02X}>" for c in "<0x41>"]
    assert tokenizer.encode("<0x41>").tokens == ["▁", *spelled]
    assert tokenizer.encode("A").tokens == ["▁", "<0x41>"]


def test_a_piece_of_the_users_stays_whole_whatever_is_likelier() -> None:
    letters = dict.fromkeys("▁MARK]", (-0.5, TokenType.NORMAL))
    others = {"x": (-9.0, TokenType.NORMAL), "x[": (-1.0, TokenType.NORMAL)}
    tokenizer = made_of({**letters, **others, "[MARK]": (0.0, TokenType.USER_DEFINED)})
    assert tokenizer.encode("x[MARK]").tokens == ["▁", "x", "[MARK]"]
    assert tokenizer.encode("x[M").tokens == ["▁", "x[", "M"]


def made_of(pieces: Mapping[str, tuple[float, int]], *, byte_fallback: bool = False) -> Library:
    """Of pieces with scores and kinds, behind the unknown one."""
    columns = {"<unk>": (0.0, int(TokenType.UNKNOWN)), **pieces}
    model = PieceModel(
        pieces=SentencePieces(
            path=Path("tokenizer.model"),
            tokens=list(columns),
            scores=[score for score, _ in columns.values()],
            types=[kind for _, kind in columns.values()],
        ),
        segmentation=Segmentation.UNIGRAM,
        byte_fallback=byte_fallback,
        charsmap=b"",
        adds_prefix=True,
        trims=False,
    )
    return unigram_tokenizer(model, prefix=True, scheme="always")


def field(number: int, payload: bytes) -> bytes:
    """Of protobuf's wire format: a length and its bytes."""
    return bytes([number << 3 | 2, len(payload)]) + payload


PIECE = field(1, field(1, b"a"))
UNKNOWN = field(1, field(1, b"<unk>") + b"\x18\x02")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (PIECE, "no piece for what is unknown"),
        (UNKNOWN + PIECE + field(2, b"\x98\x02\x01"), "no token for byte 0x00"),
        (UNKNOWN + PIECE + field(2, b"\xc0\x01\x01"), "whose space is behind them"),
        (UNKNOWN + PIECE + field(3, b"\x28\x00"), "or isn't spelled, are not supported"),
        (UNKNOWN + PIECE + field(3, field(2, b"\x01\x02")), "rules for spelling are damaged"),
        (PIECE + field(2, b"\x18\x03"), r"model_type 3 is not supported; supported: unigram"),
    ],
)
def test_what_would_give_other_tokens_is_refused(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    folder = folder_of(tmp_path, "bytes")
    (folder / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        Tokenizer.load(folder)
    assert "tokenizer.model" in str(caught.value)
    assert "\n" not in str(caught.value)
