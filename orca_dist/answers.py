"""From a stream of outputs to pieces of text: what server and LLM share.

Token ids are handed on at once; text only in whole characters, and only what can't be
the beginning of a stop string. Knows nothing of RPCs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from orca_dist.core import FinishReason
from orca_dist.engine.streams import RequestStream
from orca_dist.text import StopMatcher


class TextAssembler(Protocol):
    """One answer's ids to text, holding back characters that are incomplete."""

    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class Piece:
    """A part of an answer; `reason` is set on the last one.

    num_tokens: generated so far. logits: the engine's rows, for tokens beyond the last
    one too where a stop string ended a piece. Not frozen: there is one a message, and that
    would cost four times more.
    """

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason | None
    num_tokens: int
    logits: bytes = b""


async def pieces(
    stream: RequestStream, assembler: TextAssembler, stops: StopMatcher
) -> AsyncIterator[Piece]:
    """The answer in parts; their texts joined are the whole answer's text.

    A stop string ends it with the token that completes it; what has been sampled since
    is dropped and not counted.
    """
    num_tokens = 0
    async for output in stream:
        text, num_kept = _read(output.tokens, assembler, stops)
        if output.reason:
            text += stops.push(assembler.flush()) + stops.flush()
        num_tokens += num_kept
        if stops.matched:
            stream.finish(num_tokens)
        yield Piece(
            text=text,
            token_ids=tuple(output.tokens[:num_kept]),
            reason=FinishReason.STOP if stops.matched else output.reason,
            num_tokens=num_tokens,
            logits=output.logits,
        )


def _read(tokens: Sequence[int], assembler: TextAssembler, stops: StopMatcher) -> tuple[str, int]:
    """The text that `tokens` add, and how many of them belong to the answer."""
    text = ""
    for num_read, token in enumerate(tokens, start=1):
        text += stops.push(assembler.push((token,)))
        if stops.matched:
            return text, num_read
    return text, len(tokens)
