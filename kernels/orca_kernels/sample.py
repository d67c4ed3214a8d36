"""What sampling means, and the readable backend of it in plain torch.

Every backend computes in whole numbers, so that all of them pick the same token, whatever the
device and the order in which it sums. Of a row of fp32 logits:

- A row whose largest logit is not finite, or that holds a NaN, gives NO_TOKEN.
- A token's weight is 2^WEIGHT_BITS times its probability over the likeliest one's, rounded
  down: fp32 steps that round alike everywhere (the powers of two by COEFFICIENTS, no fused
  multiply-add), and a cut. From there on sums are exact.
- Tokens are ranked by their logits, equal ones by id. top-k keeps the first k; top-p those
  with less than its share of the kept weight before them; min-p, of these, each that weighs its
  share of the likeliest one. The first always stays.
- What is kept stands in the order of ids. Picked is the first token up to which the weights sum
  to more than the row's number times their total.

A table has a row of PARAMETERS for each token to sample, all int64 so that it travels with the
batch's other tables; fractions are float64 by their bits. Where top-k is 1 nothing but the
likeliest token is looked for.

Shapes: N rows of logits, R of them sampled, P parameters, V vocabulary (at most 2^22).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

NO_TOKEN = -1

ROW, TOP_K, SCALE, TOP_P, MIN_WEIGHT, NUMBER = range(6)
PARAMETERS = 6
KEEPS_ALL = 2**31 - 1  # of TOP_K

WEIGHT_BITS = 40
# 2^-x - 1 over x, for x in [0, 1): minimax, of relative error 2^-21.9 as fp32 steps compute it
COEFFICIENTS = (
    -0.6931437253952026,
    0.24018017947673798,
    -0.05529746040701866,
    0.009205913171172142,
    -0.0009449489298276603,
)
LOG2_E = 1.4426950408889634
MIN_TOP_P = 2.0**-60  # of any sum of weights less than one: the first token stays
MIN_SCALE, MAX_SCALE = 2.0**-40, 2.0**60  # temperatures beyond them count as these
MAX_HALVINGS = 62.0  # no weight is left of a token from WEIGHT_BITS + 1 on

PIECE_ELEMENTS = 1 << 20  # of logits that the reference takes at a time; each takes it 60 bytes


def sampling_table(
    *,
    rows: Sequence[int],
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    numbers: np.ndarray,
) -> torch.Tensor:
    """Int64 [R, P]. Temperature 0 is top-k 1, and top-k 0 keeps all; `numbers` are in [0, 1)."""
    temperature_R = np.array(temperatures, np.float64)
    top_k_R = np.array(top_ks, np.int64)
    table_RP = np.empty((len(rows), PARAMETERS), np.int64)
    table_RP[:, ROW] = rows
    table_RP[:, TOP_K] = np.where(top_k_R == 0, KEEPS_ALL, top_k_R)
    table_RP[temperature_R == 0, TOP_K] = 1
    table_RP[:, SCALE] = _scales(temperature_R).view(np.int64)
    table_RP[:, TOP_P] = np.maximum(np.array(top_ps, np.float64), MIN_TOP_P).view(np.int64)
    table_RP[:, MIN_WEIGHT] = np.ceil(np.array(min_ps, np.float64) * 2.0**WEIGHT_BITS)
    table_RP[:, NUMBER] = numbers.view(np.int64)
    return torch.from_numpy(table_RP)


def greedy_table(rows: Sequence[int]) -> torch.Tensor:
    """The same for temperature 0 in all of them, made in less time."""
    table_RP = np.zeros((len(rows), PARAMETERS), np.int64)
    table_RP[:, ROW], table_RP[:, TOP_K] = rows, 1
    table_RP.view(np.float64)[:, SCALE] = 1.0
    return torch.from_numpy(table_RP)


def _scales(temperature_R: np.ndarray) -> np.ndarray:
    """Halvings of probability a unit of logit, as fp32 holds them."""
    tiny = LOG2_E / MAX_SCALE
    scale_R = np.clip(LOG2_E / np.maximum(temperature_R, tiny), MIN_SCALE, MAX_SCALE)
    return scale_R.astype(np.float32).astype(np.float64)


def sample(logits_NV: torch.Tensor, table_RP: torch.Tensor) -> torch.Tensor:
    """A token id for each row of the table, int64 [R]. No step waits for the device."""
    num_rows = max(1, PIECE_ELEMENTS // logits_NV.shape[1])
    pieces = [_sampled(logits_NV, piece) for piece in table_RP.split(num_rows)]
    return torch.cat(pieces)


def _sampled(logits_NV: torch.Tensor, table_RP: torch.Tensor) -> torch.Tensor:
    x_RV = logits_NV.index_select(0, table_RP[:, ROW]) + 0.0  # -0 is 0, to a sort by bits as well
    best_R1 = x_RV.amax(-1, keepdim=True)
    is_bad_R1 = best_R1.isfinite().logical_not()
    x_RV, best_R1 = x_RV.masked_fill(is_bad_R1, 0.0), best_R1.masked_fill(is_bad_R1, 0.0)
    weight_RV = weights(best_R1 - x_RV, _fractions(table_RP, SCALE).float())
    kept_RV = weight_RV * _is_kept(x_RV, weight_RV, table_RP)
    drawn_R = _drawn(kept_RV, _fractions(table_RP, NUMBER))
    tokens_R = torch.where(table_RP[:, TOP_K] == 1, x_RV.argmax(-1), drawn_R)
    return tokens_R.masked_fill(is_bad_R1.squeeze(-1), NO_TOKEN)


def weights(below: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Int64, of logits that lie so far below the largest of their row."""
    halvings = (below * scale).clamp(max=MAX_HALVINGS)
    whole = halvings.long()
    part = halvings - whole.float()
    share = part * COEFFICIENTS[-1]
    for coefficient in COEFFICIENTS[-2::-1]:
        share = (share + coefficient) * part
    return ((share + 1.0) * 2.0**WEIGHT_BITS).long() >> whole


def _is_kept(x_RV: torch.Tensor, weight_RV: torch.Tensor, table_RP: torch.Tensor) -> torch.Tensor:
    """By all three filters, in the order of ids."""
    order_RV = x_RV.sort(dim=-1, descending=True, stable=True).indices
    ranked_RV = weight_RV.gather(-1, order_RV)
    ranks_V = table_RP.new_ones(x_RV.shape[1]).cumsum(0)
    is_kept_RV = ranks_V <= table_RP[:, TOP_K, None]
    total_R1 = (ranked_RV * is_kept_RV).sum(-1, keepdim=True)
    limit_R1 = (_fractions(table_RP, TOP_P) * total_R1.double()).ceil().long()
    is_kept_RV &= ranked_RV.cumsum(-1) - ranked_RV < limit_R1
    is_kept_RV &= ranked_RV >= table_RP[:, MIN_WEIGHT, None]
    return torch.zeros_like(is_kept_RV).scatter(-1, order_RV, is_kept_RV)


def _drawn(kept_RV: torch.Tensor, number_R1: torch.Tensor) -> torch.Tensor:
    """Of the weights that were kept."""
    sums_RV = kept_RV.cumsum(-1)
    total_R1 = sums_RV[:, -1:]
    target_R1 = torch.minimum((total_R1.double() * number_R1).long(), total_R1 - 1)
    return (sums_RV <= target_R1).sum(-1)


def _fractions(table_RP: torch.Tensor, parameter: int) -> torch.Tensor:
    """A column of float64, [R, 1]."""
    return table_RP[:, parameter, None].view(torch.float64)
