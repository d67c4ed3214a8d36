"""Sampling on CUDA devices: orca_kernels.sample says what it means.

A program takes a row, and sorts nothing: it walks over the row a number of times. The first walk
finds the likeliest token, which is all that a greedy row needs. What top-k and top-p keep are the
logits above some cut and the first few that equal it. The cut is bracketed between two logits,
and each walk halves the bracket and draws its ends to logits that exist, so that it closes after
few walks. The last walk stops at the piece that has the token.

Multiply and add must not be fused: weights would differ from those of other devices.
Shapes: N rows of logits, R of them sampled, P parameters, V vocabulary, C columns of a piece.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orca_kernels import sample as meaning

MAX_COLUMNS = 2048
ELEMENTS_PER_THREAD = 4  # of a piece: more would spill on sm_89

ROW = tl.constexpr(meaning.ROW)
TOP_K = tl.constexpr(meaning.TOP_K)
SCALE = tl.constexpr(meaning.SCALE)
TOP_P = tl.constexpr(meaning.TOP_P)
MIN_WEIGHT = tl.constexpr(meaning.MIN_WEIGHT)
NUMBER = tl.constexpr(meaning.NUMBER)
PARAMETERS = tl.constexpr(meaning.PARAMETERS)
NO_TOKEN = tl.constexpr(meaning.NO_TOKEN)
ONE = tl.constexpr(2.0**meaning.WEIGHT_BITS)
MAX_HALVINGS = tl.constexpr(meaning.MAX_HALVINGS)
WEIGHTLESS = tl.constexpr(meaning.WEIGHT_BITS + 4.0)  # halvings that surely leave no weight
C1, C2, C3, C4, C5 = (tl.constexpr(each) for each in meaning.COEFFICIENTS)
NEXT = tl.constexpr(1e-6)  # of a number: so far from it others can be told from it
INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["num_ids"])
def sample_rows(logits_ptr, table_ptr, tokens_ptr, row_stride, num_ids, COLUMNS: tl.constexpr):
    """Grid (R,). Of each row of logits the first `num_ids` count."""
    how_ptr = table_ptr + tl.program_id(0) * PARAMETERS
    x_ptr = logits_ptr + tl.load(how_ptr + ROW) * row_stride
    best, token, is_finite = find_best(x_ptr, num_ids, COLUMNS)
    if is_finite & (tl.load(how_ptr + TOP_K) != 1):
        token = draw(x_ptr, how_ptr, num_ids, best, COLUMNS)
    tl.store(tokens_ptr + tl.program_id(0), tl.where(is_finite, token, NO_TOKEN))


@triton.jit
def find_best(x_ptr, num_ids, COLUMNS: tl.constexpr):
    """The largest logit, the first token that has it, and whether the row can be sampled."""
    best_C = tl.full([COLUMNS], -INFINITY, tl.float32)
    token_C = tl.zeros([COLUMNS], tl.int32)
    is_nan_C = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, num_ids, COLUMNS):
        x_C = piece(x_ptr, start, num_ids, COLUMNS)
        token_C = tl.where(x_C > best_C, start + tl.arange(0, COLUMNS), token_C)
        best_C = tl.where(x_C > best_C, x_C, best_C)
        is_nan_C |= (x_C != x_C).to(tl.int32)
    best = tl.max(best_C, 0)
    token = tl.min(tl.where(best_C == best, token_C, num_ids), 0)
    is_finite = (tl.max(is_nan_C, 0) == 0) & (best > -INFINITY) & (best < INFINITY)
    return best, token, is_finite


@triton.jit
def draw(x_ptr, how_ptr, num_ids, best, COLUMNS: tl.constexpr):
    """Cuts the row, and picks from what is left.

    Kept are the logits above `cut`, the first `num_equal` of those that equal it, and of all
    these the ones that weigh `min_weight`.
    """
    top_k = tl.load(how_ptr + TOP_K)
    scale = fraction(how_ptr + SCALE).to(tl.float32)
    top_p = fraction(how_ptr + TOP_P)
    min_weight = tl.load(how_ptr + MIN_WEIGHT)
    cut = best - tl.maximum(WEIGHTLESS / scale, tl.abs(best) * NEXT)
    num_equal = tl.full((), 0, tl.int64)
    num, total = sums_above(x_ptr, num_ids, best, scale, cut, 0, COLUMNS)
    if num > top_k:
        cut = find_cut(x_ptr, num_ids, best, scale, cut, top_k, False, COLUMNS)
        num, above = sums_above(x_ptr, num_ids, best, scale, cut, 0, COLUMNS)
        num_equal = top_k - num
        total = above + num_equal * weigh(best - cut, scale)
    if top_p < 1.0:
        limit = rounded_up(top_p * total.to(tl.float64))
        cut = find_cut(x_ptr, num_ids, best, scale, cut, limit, True, COLUMNS)
        num, above = sums_above(x_ptr, num_ids, best, scale, cut, 0, COLUMNS)
        each = weigh(best - cut, scale)
        num_equal = tl.maximum(limit - above + each - 1, 0) // tl.maximum(each, 1)
        total = above + num_equal * each
    each = weigh(best - cut, scale)
    if min_weight > 0:
        each = tl.where(each >= min_weight, each, 0)
        num, above = sums_above(x_ptr, num_ids, best, scale, cut, min_weight, COLUMNS)
        total = above + num_equal * each
    target = (total.to(tl.float64) * fraction(how_ptr + NUMBER)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    # fmt: off
    return pick(
        x_ptr, num_ids, best, scale, cut, num_equal, each, min_weight, target, COLUMNS
    )
    # fmt: on


@triton.jit
def find_cut(
    x_ptr, num_ids, best, scale, low, wanted, IS_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr
):
    """The largest logit that makes up `wanted` with all above it, in number or in weight.

    Those above `low` and at it do.
    """
    high = best
    while low < high:
        middle = tl.minimum(0.5 * low + 0.5 * high, high)
        middle = tl.where(middle > low, middle, high)
        sum_C = tl.zeros([COLUMNS], tl.int64)
        least_C = tl.full([COLUMNS], INFINITY, tl.float32)
        most_C = tl.full([COLUMNS], -INFINITY, tl.float32)
        for start in range(0, num_ids, COLUMNS):
            x_C = piece(x_ptr, start, num_ids, COLUMNS)
            is_in_C = x_C >= middle
            if IS_WEIGHT:
                sum_C += tl.where(is_in_C, weigh(best - x_C, scale), 0)
            else:
                sum_C += is_in_C.to(tl.int64)
            least_C = tl.minimum(least_C, tl.where(is_in_C, x_C, INFINITY))
            most_C = tl.maximum(most_C, tl.where(is_in_C, -INFINITY, x_C))
        reached = tl.sum(sum_C, 0)
        least = tl.min(least_C, 0)
        low = tl.where(reached >= wanted, least, low)
        high = tl.where(
            reached > wanted, high, tl.where(reached == wanted, least, tl.max(most_C, 0))
        )
    return low


@triton.jit
def sums_above(x_ptr, num_ids, best, scale, cut, min_weight, COLUMNS: tl.constexpr):
    """How many logits are larger than `cut`, and the sum of those weights that are no smaller."""
    num_C = tl.zeros([COLUMNS], tl.int32)
    sum_C = tl.zeros([COLUMNS], tl.int64)
    for start in range(0, num_ids, COLUMNS):
        x_C = piece(x_ptr, start, num_ids, COLUMNS)
        weight_C = weigh(best - x_C, scale)
        num_C += (x_C > cut).to(tl.int32)
        sum_C += tl.where((x_C > cut) & (weight_C >= min_weight), weight_C, 0)
    return tl.sum(num_C, 0).to(tl.int64), tl.sum(sum_C, 0)


@triton.jit
def pick(
    x_ptr,
    num_ids,
    best,
    scale,
    cut,
    num_equal,
    each,
    min_weight,
    target,
    COLUMNS: tl.constexpr,
):
    """The first token up to which the kept weights sum to more than `target`."""
    start = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int64)
    left = num_equal
    # fmt: off
    kept, equal = kept_piece(
        x_ptr, start, num_ids, best, scale, cut, left, each, min_weight, COLUMNS
    )
    while (before + kept <= target) & (start + COLUMNS < num_ids):
        before += kept
        left = tl.maximum(left - equal, 0)
        start += COLUMNS
        kept, equal = kept_piece(
            x_ptr, start, num_ids, best, scale, cut, left, each, min_weight, COLUMNS
        )
    # fmt: on
    x_C = piece(x_ptr, start, num_ids, COLUMNS)
    weight_C = weigh(best - x_C, scale)
    is_equal_C = x_C == cut
    is_kept_C = (x_C > cut) | (is_equal_C & (tl.cumsum(is_equal_C.to(tl.int32), 0) <= left))
    weight_C = tl.where(is_kept_C & (weight_C >= min_weight), weight_C, 0)
    is_before_C = before + tl.cumsum(weight_C, 0) <= target
    return start + tl.sum(is_before_C.to(tl.int32), 0)


@triton.jit
def kept_piece(
    x_ptr, start, num_ids, best, scale, cut, left, each, min_weight, COLUMNS: tl.constexpr
):
    """The sum of a piece's kept weights, and how many equal the cut; `left` of those are kept."""
    x_C = piece(x_ptr, start, num_ids, COLUMNS)
    weight_C = weigh(best - x_C, scale)
    above = tl.sum(tl.where((x_C > cut) & (weight_C >= min_weight), weight_C, 0), 0)
    num = tl.sum((x_C == cut).to(tl.int32), 0).to(tl.int64)
    return above + tl.minimum(num, left) * each, num


@triton.jit
def weigh(below, scale):
    """See orca_kernels.sample.weights."""
    halvings = tl.minimum(below * scale, MAX_HALVINGS)
    whole = halvings.to(tl.int32)
    part = halvings - whole.to(tl.float32)
    share = (((part * C5 + C4) * part + C3) * part + C2) * part + C1
    return ((share * part + 1.0) * ONE).to(tl.int64) >> whole.to(tl.int64)


@triton.jit
def piece(x_ptr, start, num_ids, COLUMNS: tl.constexpr):
    """Logits from `start` on; past the last id there is nothing likely."""
    column_C = start + tl.arange(0, COLUMNS)
    return tl.load(x_ptr + column_C, mask=column_C < num_ids, other=-INFINITY)


@triton.jit
def fraction(ptr):
    """A float64 that is kept as its bits."""
    return tl.load(ptr).to(tl.float64, bitcast=True)


@triton.jit
def rounded_up(x):
    """To a whole number; of a float64 that isn't negative."""
    whole = x.to(tl.int64)
    return whole + (whole.to(tl.float64) < x).to(tl.int64)


def sample(
    logits_NV: torch.Tensor, table_RP: torch.Tensor, *, max_columns: int = MAX_COLUMNS
) -> torch.Tensor:
    """See orca_kernels.sample.sample; a row's logits lie side by side."""
    tokens_R = table_RP.new_empty(len(table_RP))
    if len(table_RP):
        num_ids = logits_NV.shape[1]
        constants = sample_constants(num_ids=num_ids, max_columns=max_columns)
        sample_rows[(len(table_RP),)](
            logits_NV, table_RP, tokens_R, logits_NV.stride(0), num_ids, **constants
        )
    return tokens_R


def sample_constants(*, num_ids: int, max_columns: int = MAX_COLUMNS) -> dict[str, int]:
    """What sample_rows is compiled for."""
    columns = min(max_columns, triton.next_power_of_2(num_ids))
    return {
        "COLUMNS": columns,
        "num_warps": max(1, columns // (32 * ELEMENTS_PER_THREAD)),
        "enable_fp_fusion": False,
    }
