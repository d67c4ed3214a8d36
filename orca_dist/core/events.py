"""What the scheduler tells the outside about a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orca_dist.core.request import FinishReason


@dataclass(slots=True)
class Output:
    """New tokens of one request; `reason` is set on the last one, `message` on errors.

    `cached_tokens`: how many of the prompt's tokens were in the KV cache already. `logits` is
    the last stage's opaque payload, for requests that asked for it; it may come without tokens.
    Not frozen: there is one for each request and iteration, and that would cost four times more.
    """

    id: int
    tokens: Sequence[int] = ()
    reason: FinishReason | None = None
    message: str = ""
    cached_tokens: int = 0
    logits: bytes = b""
