"""The sentencepiece kind of tokenizer (Llama 2, TinyLlama, Mistral) from a GGUF file.

The file has a score for each piece and no merges. Sentencepiece joins the neighbours
whose joint piece scores highest, so a merge for each way to cut each piece, best score
first, does the same. Characters without a piece are spelled in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from enum import IntEnum

from tokenizers import Tokenizer, decoders, models, normalizers

from orca_dist.errors import ModelError
from orca_dist.weights.gguf_file import GgufFile

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_NUM_BYTES = 256


class TokenType(IntEnum):
    """GGUF's kinds of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def sentencepiece_tokenizer(source: GgufFile) -> Tokenizer:
    """Without its added tokens. Raises ModelError for what would give other tokens."""
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    types: list[int] = source.need("tokenizer.ggml.token_type")
    _refuse_unsupported(source, tokens, types)
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(source, tokens, types),
        unk_token=_unknown(tokens, types),
        fuse_unk=True,
        byte_fallback=True,
    )
    return _spelling_spaces(model, prefix=source.get("tokenizer.ggml.add_space_prefix", True))


def _unknown(tokens: Sequence[str], types: Sequence[int]) -> str | None:
    return tokens[types.index(TokenType.UNKNOWN)] if TokenType.UNKNOWN in types else None


def _spelling_spaces(model: models.BPE, *, prefix: bool) -> Tokenizer:
    """Spaces are part of the pieces; with `prefix`, every run of text starts with one."""
    tokenizer = Tokenizer(model)
    spell = normalizers.Replace(" ", SPACE)
    start = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*start, spell])
    end = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return tokenizer


def _refuse_unsupported(source: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> None:
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if source.get(key):
            raise ModelError(f"{source.path}: {key} is not supported: it changes the text first")
    spelled = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.BYTE}
    missing = [byte for byte in range(_NUM_BYTES) if f"<0x{byte:02X}>" not in spelled]
    if missing:
        raise ModelError(
            f"{source.path}: its vocabulary has no token for byte 0x{missing[0]:02X}; a "
            "sentencepiece vocabulary without all 256 byte tokens is not supported"
        )


def _merges(source: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> list[tuple[str, str]]:
    """Best first; pieces of other kinds than text are never joined from parts."""
    scores: list[float] = source.need("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{source.path}: {len(tokens)} tokens have {len(scores)} scores")
    pieces = {
        token: (-score, index)
        for index, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True))
        if kind == TokenType.NORMAL
    }
    _refuse_hidden_cuts(source, pieces, frozenset(tokens))
    ranked = sorted(pieces, key=pieces.__getitem__)
    return [cut for piece in ranked for cut in _cuts(piece, pieces)]


def _cuts(piece: str, pieces: Container[str]) -> Iterator[tuple[str, str]]:
    for at in range(1, len(piece)):
        left, right = piece[:at], piece[at:]
        if left in pieces and right in pieces:
            yield left, right


def _refuse_hidden_cuts(source: GgufFile, pieces: Collection[str], known: Container[str]) -> None:
    """Sentencepiece joins a character that is no piece, too; merges can't say that."""
    for piece in pieces:
        for part, character in ((piece[:-1], piece[-1:]), (piece[1:], piece[:1])):
            if character not in known and (part in pieces or len(part) == 1):
                raise ModelError(
                    f"{source.path}: the piece {piece!r} has a character without a piece of "
                    "its own, which is not supported"
                )
