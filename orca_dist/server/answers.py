"""From a stream of outputs to pieces of text: what both ways of calling share.

Token ids are handed on at once; text only in whole characters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from orca_dist.engine.streams import RequestStream
from orca_dist.server.convert import Piece


class TextAssembler(Protocol):
    """One answer's ids to text, holding back characters that are incomplete."""

    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


async def pieces(stream: RequestStream, assembler: TextAssembler) -> AsyncIterator[Piece]:
    """The answer in parts; their texts joined are the whole answer's text."""
    async for output in stream:
        text = assembler.push(output.tokens)
        if output.reason:
            text += assembler.flush()
        yield Piece(
            text=text,
            token_ids=output.tokens,
            reason=output.reason,
            num_tokens=stream.num_tokens,
        )
