"""Text of an answer while it is generated: token ids in, whole characters out.

One per stream. What comes out is final: joined, the chunks are `Tokenizer.decode` of all
ids. Time is linear in the tokens, whatever bytes they hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from orca_dist.text.tokenizer import Tokenizer


class Detokenizer:
    """Holds back at most the bytes of one incomplete character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = tokenizer.pieces.utf8()
        self._started = False

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; special ones have no text."""
        pieces = [self._bytes(token) for token in self._tokenizer.with_text(token_ids)]
        return self._utf8.push(b"".join(pieces))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.push(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        if self._started:
            return self._tokenizer.pieces.later(token)
        self._started = True
        return self._tokenizer.pieces.first(token)
