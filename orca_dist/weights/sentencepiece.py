"""A sentencepiece vocabulary of the BPE type as a tokenizer: what Llama 2 and Mistral have.

Such a vocabulary has a score for each piece and no merges. Sentencepiece joins the
neighbours whose joint piece scores highest, so a merge for each way to cut each piece, best
score first, does the same. Characters without a piece are spelled in bytes. What would give
other tokens is refused. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from orca_dist.errors import ModelError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PrefixScheme = Literal["first", "always"]
_NUM_BYTES = 256


class TokenType(IntEnum):
    """Sentencepiece's kinds of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieces:
    """Columns by token id, and whose they are, for messages."""

    path: Path
    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]


def bpe_tokenizer(
    pieces: SentencePieces, *, prefix: bool, scheme: PrefixScheme | None = None
) -> Tokenizer:
    """Without its added tokens. Raises ModelError for what would give other tokens.

    prefix: each run of text between added tokens gets a space before it. With a `scheme`, as
    transformers has it: only one that doesn't start with a space, and all runs or the first.
    """
    refuse_missing_bytes(pieces.path, pieces.tokens, pieces.types)
    model = models.BPE(
        vocab={token: index for index, token in enumerate(pieces.tokens)},
        merges=_merges(pieces),
        unk_token=_unknown(pieces),
        fuse_unk=True,
        byte_fallback=True,
    )
    return _spelling_spaces(model, prefix=prefix, scheme=scheme)


def _unknown(pieces: SentencePieces) -> str | None:
    if TokenType.UNKNOWN not in pieces.types:
        return None
    return pieces.tokens[pieces.types.index(TokenType.UNKNOWN)]


def _spelling_spaces(model: models.BPE, *, prefix: bool, scheme: PrefixScheme | None) -> Tokenizer:
    """Spaces are part of the pieces."""
    tokenizer = Tokenizer(model)
    spell = normalizers.Replace(" ", SPACE)
    if prefix and scheme:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme=scheme, split=False
        )
    else:
        start = [normalizers.Prepend(SPACE)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*start, spell])
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return tokenizer


def refuse_missing_bytes(path: Path, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Raises ModelError unless any text can be spelled."""
    typed = zip(tokens, types, strict=True)
    spelled = {token for token, kind in typed if kind == TokenType.BYTE}
    missing = [byte for byte in range(_NUM_BYTES) if f"<0x{byte:02X}>" not in spelled]
    if missing:
        raise ModelError(
            f"{path}: its vocabulary has no token for byte 0x{missing[0]:02X}; a "
            "sentencepiece vocabulary without all 256 byte tokens is not supported"
        )


def _merges(pieces: SentencePieces) -> list[tuple[str, str]]:
    """Best first; pieces of other kinds than text are never joined from parts."""
    if len(pieces.scores) != len(pieces.tokens):
        raise ModelError(
            f"{pieces.path}: {len(pieces.tokens)} tokens have {len(pieces.scores)} scores"
        )
    columns = zip(pieces.tokens, pieces.scores, pieces.types, strict=True)
    normal = {
        token: (-score, index)
        for index, (token, score, kind) in enumerate(columns)
        if kind == TokenType.NORMAL
    }
    _refuse_hidden_cuts(pieces.path, normal, frozenset(pieces.tokens))
    ranked = sorted(normal, key=normal.__getitem__)
    return [cut for piece in ranked for cut in _cuts(piece, normal)]


def _cuts(piece: str, pieces: Container[str]) -> Iterator[tuple[str, str]]:
    for at in range(1, len(piece)):
        left, right = piece[:at], piece[at:]
        if left in pieces and right in pieces:
            yield left, right


def _refuse_hidden_cuts(path: Path, pieces: Mapping[str, object], known: Container[str]) -> None:
    """Sentencepiece joins a character that is no piece, too; merges can't say that."""
    for piece in pieces:
        for part, character in ((piece[:-1], piece[-1:]), (piece[1:], piece[:1])):
            if character not in known and (part in pieces or len(part) == 1):
                raise ModelError(
                    f"{path}: the piece {piece!r} has a character without a piece of "
                    "its own, which is not supported"
                )
