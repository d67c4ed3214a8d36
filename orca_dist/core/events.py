"""What the scheduler tells the outside about a request."""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.core.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens of one request; `reason` is set on the last one, `message` on errors.

    `logits` is the last stage's opaque payload, for requests that asked for it.
    """

    id: int
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    message: str = ""
    logits: bytes = b""
