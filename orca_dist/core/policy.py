"""How large a batch may be: the two ways of forming one.

`paper` is Algorithm 1's rule, fill up to max_batch_size. `balanced` shares the
admitted requests out over the plans in flight: filling up leaves batches of 61,
1, 1 and 1 for ever once one slot frees at a time, and three of four stages idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Forming(StrEnum):
    """How select() sizes the next batch."""

    BALANCED = "balanced"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class BatchCaps:
    """Most requests, and most prompt tokens, in the next batch."""

    num_requests: int
    prefill_tokens: int


def batch_caps(
    forming: Forming,
    *,
    admitted: int,
    prefill_tokens: int,
    inflight: int,
    max_batch_size: int,
    max_batch_tokens: int,
    min_chunk: int,
) -> BatchCaps:
    """Caps from the pool's counts.

    `balanced` counts admitted requests, not free places: ceil(admitted / inflight)
    each, and as much of the waiting prompt tokens, though at least `min_chunk`.
    """
    if forming is Forming.PAPER:
        return BatchCaps(max_batch_size, max_batch_tokens)
    share = max(min_chunk, -(-prefill_tokens // inflight))
    return BatchCaps(
        min(max_batch_size, -(-admitted // inflight)),
        min(max_batch_tokens, share),
    )
