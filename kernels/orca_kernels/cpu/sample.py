"""Sampling on CPUs, row by row in numpy: orca_kernels.sample says what it means.

A greedy row costs its argmax. Shapes: N rows of logits, R of them sampled, P parameters, V
vocabulary, K tokens that are kept.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from orca_kernels.sample import (
    COEFFICIENTS,
    MAX_HALVINGS,
    MIN_WEIGHT,
    NO_TOKEN,
    NUMBER,
    ROW,
    SCALE,
    TOP_K,
    TOP_P,
    WEIGHT_BITS,
)

FP32_BIAS, FP32_MANTISSA_BITS = 127, 23


def sample(logits_NV: torch.Tensor, table_RP: torch.Tensor) -> torch.Tensor:
    """See orca_kernels.sample.sample."""
    logits, table = logits_NV.numpy(), table_RP.numpy()
    tokens = [_token(logits[how_P[ROW]], how_P) for how_P in table]
    return torch.tensor(tokens, dtype=torch.int64)


def _token(x_V: np.ndarray, how_P: np.ndarray) -> int:
    best_id = int(x_V.argmax())  # a NaN, if there is one; ten times torch's speed
    if not math.isfinite(x_V[best_id]):
        return NO_TOKEN
    if how_P[TOP_K] == 1:
        return best_id
    with np.errstate(over="ignore"):  # between logits at both ends of fp32
        return _drawn(x_V, x_V[best_id], how_P)


def _drawn(x_V: np.ndarray, best: np.float32, how_P: np.ndarray) -> int:
    fractions_P = how_P.view(np.float64)
    scale = np.float32(fractions_P[SCALE])
    ids_K = None
    if how_P[TOP_K] < len(x_V) or fractions_P[TOP_P] < 1:
        ids_K = _kept_ids(x_V, best, scale, how_P[TOP_K], fractions_P[TOP_P])
        x_V = x_V[ids_K]
    weight_K = weights(best - x_V, scale)
    if how_P[MIN_WEIGHT] > 0:
        weight_K[weight_K < how_P[MIN_WEIGHT]] = 0
    sums_K = weight_K.cumsum()
    total = int(sums_K[-1])
    target = min(int(float(total) * fractions_P[NUMBER]), total - 1)
    at = int(sums_K.searchsorted(target, side="right"))
    return at if ids_K is None else int(ids_K[at])


def _kept_ids(
    x_V: np.ndarray, best: np.float32, scale: np.float32, top_k: int, top_p: float
) -> np.ndarray:
    """The first tokens by rank, as many as both filters leave; ascending."""
    ranked_K = _largest(x_V, top_k)
    weight_K = weights(best - ranked_K, scale)
    sums_K = weight_K.cumsum()
    limit = math.ceil(top_p * float(sums_K[-1]))
    num_kept = np.count_nonzero(sums_K - weight_K < limit)
    least = ranked_K[num_kept - 1]
    is_kept_V = x_V > least
    num_equal = num_kept - np.count_nonzero(is_kept_V)
    is_kept_V[np.flatnonzero(x_V == least)[:num_equal]] = True
    return np.flatnonzero(is_kept_V)


def _largest(x_V: np.ndarray, num: int) -> np.ndarray:
    """At most so many, descending."""
    if num < len(x_V):
        x_V = np.partition(x_V, len(x_V) - num)[len(x_V) - num :]
    return np.sort(x_V)[::-1]


def weights(below: np.ndarray, scale: np.float32) -> np.ndarray:
    """See orca_kernels.sample.weights; `below` is taken for room."""
    halvings = np.multiply(below, scale, out=below)
    np.minimum(halvings, np.float32(MAX_HALVINGS), out=halvings)
    whole = np.floor(halvings)
    part = np.subtract(halvings, whole, out=halvings)
    share = part * np.float32(COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        share += np.float32(coefficient)
        share *= part
    share += np.float32(1.0)
    share *= _halved(whole)
    return share.astype(np.int64)


def _halved(times: np.ndarray) -> np.ndarray:
    """2^WEIGHT_BITS over powers of two, as fp32: their exponents, put in place as bits."""
    exponents = times.astype(np.int32)
    np.subtract(WEIGHT_BITS + FP32_BIAS, exponents, out=exponents)
    exponents <<= FP32_MANTISSA_BITS
    return exponents.view(np.float32)
