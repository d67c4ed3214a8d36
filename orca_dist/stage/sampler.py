"""What the last stage tells its device of the tokens to sample, and makes of what comes back.

Randomness is a counter-based stream keyed by (seed, position): no state, so a
request draws the same numbers alone or batched, and again after it is recomputed.
How a number becomes a token is the kernels' affair (orca_kernels.sample). Shapes:
E entries that sample, P parameters of each, L rows of an entry, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from orca_kernels.sample import NO_TOKEN, greedy_table, sampling_table

from orca_dist.proto.v1.control_pb2 import FailedRequest, Logits, Result, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One entry of which `rows` of the batch need logits.

    Where it `samples`, the last of them gives the token at `position`.
    """

    id: int
    rows: range
    samples: bool
    position: int
    sampling: Sampling


def parameters(sampled: Sequence[Sampled]) -> torch.Tensor:
    """Of the entries that sample, int64 [E, P]; their rows are counted among all that need logits.

    What is random is worked out here: it takes whole numbers of 64 bits.
    """
    ends = accumulate(len(entry.rows) for entry in sampled)
    rows = [end - 1 for end, entry in zip(ends, sampled, strict=True) if entry.samples]
    drawn = [entry for entry in sampled if entry.samples]
    how = [entry.sampling for entry in drawn]
    if all(sampling.temperature == 0 for sampling in how):
        return greedy_table(rows)
    return sampling_table(
        rows=rows,
        temperatures=[sampling.temperature for sampling in how],
        top_ks=[sampling.top_k for sampling in how],
        top_ps=[sampling.top_p for sampling in how],
        min_ps=[sampling.min_p for sampling in how],
        numbers=uniform(
            np.array([sampling.seed for sampling in how], np.uint64),
            np.array([entry.position for entry in drawn], np.uint64),
        ),
    )


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from the streams `seeds` at `positions` (SplitMix64, hashed twice)."""
    mixed = _mix(_mix(seeds) ^ (positions * np.uint64(0xD1342543DE82EF95)))
    return (mixed >> np.uint64(11)) * 2.0**-53


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's step and finaliser (Steele, Lea, Flood 2014), modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def asked_for(sampled: Sequence[Sampled], logits_RV: torch.Tensor) -> list[torch.Tensor]:
    """The logits that are returned, [L, V] of each entry that wants its own."""
    ends = accumulate(len(entry.rows) for entry in sampled)
    return [
        logits_RV[end - len(entry.rows) : end]
        for end, entry in zip(ends, sampled, strict=True)
        if entry.sampling.return_logits
    ]


def result_of(
    seq: int, sampled: Sequence[Sampled], tokens: Sequence[int], logits: Sequence[torch.Tensor]
) -> Result:
    """The answer to plan `seq`: tokens of the entries that sample, and the logits asked for."""
    result = Result(seq=seq)
    next_tokens, next_logits = iter(tokens), iter(logits)
    for entry in sampled:
        rows = next(next_logits) if entry.sampling.return_logits else None
        is_well = not entry.samples or _note_token(result, entry, next_tokens)
        if is_well and rows is not None:
            result.logits.append(Logits(id=entry.id, rows=rows.numpy().tobytes()))
    return result


def _note_token(result: Result, entry: Sampled, tokens: Iterator[int]) -> bool:
    """False where there is none: the request has failed then."""
    token = next(tokens)
    if token == NO_TOKEN:
        message = f"the logits at position {entry.position} are not finite"
        result.failed.append(FailedRequest(id=entry.id, message=message))
        return False
    result.ids.append(entry.id)
    result.num_tokens.append(1)
    result.tokens.append(token)
    return True
