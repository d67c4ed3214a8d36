"""Picks the next tokens, on the last stage.

Randomness is a counter-based stream keyed by (seed, position): no state, so a
request draws the same numbers alone or batched, and again after it is recomputed.
Every row is treated by itself. Shapes: R rows, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import torch

from orca_dist.proto.v1.control_pb2 import Sampling

_MASK = 2**64 - 1


def sample_row(logits_V: torch.Tensor, sampling: Sampling, position: int) -> int:
    """The token at `position`, from fp32 logits; raises ValueError if they aren't finite."""
    best_id = int(logits_V.numpy().argmax())  # a NaN, if there is one; ten times torch's speed
    best = logits_V[best_id]
    if not torch.isfinite(best):
        raise ValueError(f"the logits at position {position} are not finite")
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best_id
    # In double: a tiny temperature is zero in fp32, and 0 / 0 is no probability.
    probs_V = torch.softmax((logits_V - best).double() / sampling.temperature, dim=-1)
    if _keeps_all(sampling):
        return _pick(probs_V, uniform(sampling.seed, position))
    probs_K, ids_K = _filtered(probs_V, sampling)
    return int(ids_K[_pick(probs_K, uniform(sampling.seed, position))])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from the stream `seed` at `position` (SplitMix64, hashed twice)."""
    return (_mix(_mix(seed) ^ (position * 0xD1342543DE82EF95 & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's step and finaliser (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _keeps_all(sampling: Sampling) -> bool:
    return sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0


def _filtered(probs_V: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens that top-k, then top-p, then min-p leave, and their ids.

    top_p counts within what top_k left. The likeliest token always stays.
    """
    probs_V, ids_V = probs_V.sort(descending=True, stable=True)
    num_kept = min(sampling.top_k or len(probs_V), len(probs_V))
    probs_K = probs_V[:num_kept]
    before_K = probs_K.cumsum(0) - probs_K
    keep_K = before_K < sampling.top_p * probs_K.sum()
    keep_K &= probs_K >= sampling.min_p * probs_K[0]
    keep_K[0] = True
    return probs_K[keep_K], ids_V[:num_kept][keep_K]


def _pick(probs_K: torch.Tensor, number: float) -> int:
    """Inverse of the cumulative distribution; zero-probability tokens are never picked."""
    sums_K = probs_K.cumsum(0)
    index = int(torch.searchsorted(sums_K, sums_K[-1] * number, right=True))
    is_between = index < len(probs_K) and bool(probs_K[index] > 0)
    return index if is_between else int(probs_K.nonzero()[-1])
