"""A sentencepiece vocabulary of the unigram type as a tokenizer.

Such a model takes the likeliest way to cut a text into pieces (Kudo, 2018), after its own
rules for spelling have been applied. Gives sentencepiece's ids for text without special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from orca_dist.errors import ModelError
from orca_dist.text.piece_model import PieceModel
from orca_dist.weights.sentencepiece import (
    SPACE,
    PrefixScheme,
    SentencePieces,
    TokenType,
    refuse_missing_bytes,
)

_BYTE_SPELLING = "<>x0123456789ABCDEF"
_BYTE_SPELLING_LEN = len("<0x00>")
_BELOW = 100.0


def unigram_tokenizer(model: PieceModel, *, prefix: bool, scheme: PrefixScheme) -> Tokenizer:
    """Without its added tokens; raises ModelError for what would give other tokens.

    prefix: a space is put before a text, by `scheme` before all runs of it between added
    tokens or before the first.
    """
    pieces = model.pieces
    if model.byte_fallback:
        refuse_missing_bytes(pieces.path, pieces.tokens, pieces.types)
    tokenizer = Tokenizer(
        models.Unigram(
            list(zip(pieces.tokens, _scores(pieces), strict=True)),
            unk_id=_unknown_id(pieces),
            byte_fallback=model.byte_fallback,
        )
    )
    every_run = prefix and scheme == "always"
    tokenizer.normalizer = normalizers.Sequence(list(_normalizers(model, prefixed=every_run)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(_splitters(model, prefix, scheme)))
    tokenizer.decoder = decoders.Sequence(list(_decoders(model, prefix=prefix)))
    return tokenizer


def _unknown_id(pieces: SentencePieces) -> int:
    if TokenType.UNKNOWN not in pieces.types:
        raise ModelError(
            f"{pieces.path} has no piece for what is unknown: fetch a folder with tokenizer.json"
        )
    return pieces.types.index(TokenType.UNKNOWN)


def _scores(pieces: SentencePieces) -> list[float]:
    """Of a byte so low that a text which spells its name is cut into characters instead."""
    typed = list(zip(pieces.scores, pieces.types, strict=True))
    lowest = min((score for score, kind in typed if kind == TokenType.NORMAL), default=0.0)
    of_byte = _BYTE_SPELLING_LEN * min(lowest, 0.0) - _BELOW
    return [of_byte if kind == TokenType.BYTE else score for score, kind in typed]


def _normalizers(model: PieceModel, *, prefixed: bool) -> Iterator[normalizers.Normalizer]:
    """In sentencepiece's order; of white space, only spaces are trimmed."""
    if model.charsmap:
        yield _precompiled(model)
    if model.trims:
        yield normalizers.Replace(Regex(r"\A +| +\z"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    yield normalizers.Replace(" ", SPACE)
    if prefixed:  # the splitter puts none before a text that begins with one
        yield normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2)


def _precompiled(model: PieceModel) -> normalizers.Normalizer:
    try:
        return normalizers.Precompiled(model.charsmap)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ModelError(
            f"{model.pieces.path}: its rules for spelling are damaged ({error}): fetch it again"
        ) from None


def _splitters(
    model: PieceModel, prefix: bool, scheme: PrefixScheme
) -> Iterator[pre_tokenizers.PreTokenizer]:
    """The space before; pieces that are never cut nor joined; characters that no piece has."""
    if prefix:
        yield pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    if whole := _user_defined(model.pieces):
        yield _isolated("|".join(re.escape(piece) for piece in whole))
    if model.byte_fallback and (alone := _uncovered(model.pieces)):
        yield _isolated("[" + re.escape("".join(alone)) + "]")


def _isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _uncovered(pieces: SentencePieces) -> Sequence[str]:
    """Of the characters that name a byte: a name with one of them in it is cut there."""
    kinds = (TokenType.NORMAL, TokenType.USER_DEFINED)
    typed = zip(pieces.tokens, pieces.types, strict=True)
    covered = set().union(*(token for token, kind in typed if kind in kinds))
    return [character for character in _BYTE_SPELLING if character not in covered]


def _user_defined(pieces: SentencePieces) -> Sequence[str]:
    """Longest first, as sentencepiece matches them."""
    typed = zip(pieces.tokens, pieces.types, strict=True)
    return sorted((token for token, kind in typed if kind == TokenType.USER_DEFINED), key=len)[::-1]


def _decoders(model: PieceModel, *, prefix: bool) -> Iterator[decoders.Decoder]:
    yield decoders.Replace(SPACE, " ")
    if model.byte_fallback:
        yield decoders.ByteFallback()
    yield decoders.Fuse()
    if prefix:
        yield decoders.Strip(" ", 1, 0)
