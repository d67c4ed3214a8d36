"""Token id -> the bytes that it adds to the text: what makes decoding incremental.

A character may be spread over several tokens, so tokens are joined as bytes and only
then read as UTF-8. Two families spell bytes: byte-level BPE (every token, in an alphabet
of 256 printable characters) and byte fallback (pieces like <0x9F>). Each token's bytes
depend on the token alone, except that the first may lose its leading space.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # how surrogateescape spells an invalid byte


class Pieces:
    """The bytes of each token of one tokenizer; remembers those it has met."""

    def __init__(self, tokenizer: HFTokenizer, decoder: Any) -> None:
        """`decoder` is tokenizer.json's entry of that name."""
        kinds = set(_decoder_kinds(decoder))
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor = _anchor(tokenizer)
        self._anchor_len = len(tokenizer.decode([self._anchor], skip_special_tokens=False))
        self._later: dict[int, bytes] = {}

    def first(self, token: int) -> bytes:
        """As the first token of a text."""
        if self._alphabet is not None:
            return self.later(token)
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return self.later(token) if REPLACEMENT in text else text.encode()

    def later(self, token: int) -> bytes:
        """As any other token of a text."""
        known = self._later.get(token)
        if known is None:
            known = self._later[token] = self._bytes(token)
        return known

    def utf8(self) -> Utf8Stream:
        """A reader of what these tokens' bytes join to."""
        return Utf8Stream(per_byte=self._alphabet is None)

    def _bytes(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        assert piece is not None, "callers keep to ids of the vocabulary"
        if self._alphabet is not None:
            return _spelled(piece, self._alphabet)
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        pair = self._tokenizer.decode([self._anchor, token], skip_special_tokens=False)
        return pair[self._anchor_len :].encode()


class Utf8Stream:
    """Bytes in, whole characters out; invalid bytes become U+FFFD once they can't be completed.

    As the tokenizers library has it: one for each invalid byte with byte fallback, one
    for each invalid sequence otherwise.
    """

    def __init__(self, *, per_byte: bool) -> None:
        errors = "surrogateescape" if per_byte else "replace"
        self._per_byte = per_byte
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def push(self, data: bytes, *, final: bool = False) -> str:
        """The characters that `data` completes; with `final`, the incomplete rest too."""
        text = self._decoder.decode(data, final)
        return _ESCAPED_BYTE.sub(REPLACEMENT, text) if self._per_byte else text


def _decoder_kinds(decoder: Any) -> Iterator[str]:
    """The `type` of a decoder entry and of those inside it."""
    if isinstance(decoder, Mapping):
        yield decoder.get("type", "")
        for inner in decoder.get("decoders", ()):
            yield from _decoder_kinds(inner)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character -> byte: printable Latin-1 stands for itself, the rest for
    the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def _spelled(piece: str, alphabet: Mapping[str, int]) -> bytes:
    """A piece read in the byte alphabet, or as plain text where it isn't in it."""
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


def _anchor(tokenizer: HFTokenizer) -> int:
    """A token with a text of its own, to decode others after."""
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=True)
        if text.strip() and REPLACEMENT not in text:
            return token
    return 0
