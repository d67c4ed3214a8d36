"""Causal attention of a mixed batch over paged KV: one launch, and one more to merge long contexts.

A program takes one KV head and one tile of its query heads' rows (tiles.py), walks over the
tile's part of the context and keeps a running softmax. Where a context is cut it leaves
(peak, total, sum) of each row, which a second kernel merges. Query heads of one KV head
share a tile, so keys and values are read once for all of them. KV of fewer bits than the
queries is widened as it is loaded.

A softcap bounds a score s to softcap * tanh(s / softcap), with tanh(x) = 1 - 2 / (e^2x + 1), which
nothing can make overflow. As scores are powers of 2 here, factors are chosen so that it takes
one product less: see `score_factors`.

Shapes: T rows of the batch, N query heads, M KV heads, D head size, B blocks of S slots;
in a program R flat rows of a tile, K keys of a step, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from orca_kernels import reference
from orca_kernels.context import AttentionContext
from orca_kernels.triton.tiles import (
    MAX_CHUNKS,
    MERGE_COLUMNS,
    NARROW,
    TILE_COLUMNS,
    Tiles,
    decode_tiles_of,
    tiles_of,
)

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
NO_WINDOW = 2**30  # positions; more than any context has
TILE_STRIDE = tl.constexpr(TILE_COLUMNS)
MERGE_STRIDE = tl.constexpr(MERGE_COLUMNS)


@triton.jit(do_not_specialize=["window", "group"])
def attend_tiles(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    blocks_ptr,
    tiles_ptr,
    peak_ptr,
    total_ptr,
    sum_ptr,
    scale,
    cap,
    window,
    group,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NARROW_ROWS: tl.constexpr,
    WIDE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WIDE: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Grid (P tiles, M). Without HAS_WIDE all tiles are narrow. scale, cap: see score_factors()."""
    tile_ptr = tiles_ptr + tl.program_id(0) * TILE_STRIDE
    is_wide = tl.load(tile_ptr + 2) * group > NARROW_ROWS if HAS_WIDE else False
    # fmt: off
    if is_wide:
        attend_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, blocks_ptr, tile_ptr, peak_ptr, total_ptr, sum_ptr,
            scale, cap, window, group, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, WIDE_ROWS, KEYS, HAS_CAP,
        )
    else:
        attend_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, blocks_ptr, tile_ptr, peak_ptr, total_ptr, sum_ptr,
            scale, cap, window, group, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, NARROW_ROWS, KEYS, HAS_CAP,
        )
    # fmt: on


@triton.jit
def attend_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    blocks_ptr,
    tile_ptr,
    peak_ptr,
    total_ptr,
    sum_ptr,
    scale,
    cap,
    window,
    group,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """One tile of ROWS flat rows, of which those past the request's last are idle."""
    first_row = tl.load(tile_ptr)
    start = tl.load(tile_ptr + 1)
    length = tl.load(tile_ptr + 2)
    blocks_ptr += tl.load(tile_ptr + 3)
    tile_row = tl.load(tile_ptr + 4)
    first_key = tl.load(tile_ptr + 5)
    end_key = tl.load(tile_ptr + 6)
    partial = tl.load(tile_ptr + 7)

    row_R = tile_row + tl.arange(0, ROWS)
    dim_D = tl.arange(0, PADDED_DIM)
    is_row_R = row_R < length * group
    is_held_RD = is_row_R[:, None] & (dim_D < HEAD_DIM)[None, :]
    at_RD = head_at(first_row, row_R, group)[:, None] * HEAD_DIM + dim_D[None, :]
    position_R = start + row_R // group
    q_RD = tl.load(q_ptr + at_RD, mask=is_held_RD, other=0.0)

    peak_R = tl.full([ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    sum_RD = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    first_seen = tl.maximum(first_key, start + tile_row // group - window + 1)
    for key in range(first_seen // KEYS * KEYS, end_key, KEYS):
        key_K = key + tl.arange(0, KEYS)
        is_key_K = (key_K >= first_seen) & (key_K < end_key)
        at_K = cached_at(blocks_ptr, key_K, is_key_K, BLOCK_SIZE) * HEAD_DIM
        is_cached_KD = is_key_K[:, None] & (dim_D < HEAD_DIM)[None, :]
        at_KD = at_K[:, None] + dim_D[None, :]
        k_KD = widened(tl.load(k_ptr + at_KD, mask=is_cached_KD, other=0.0), q_RD.dtype)
        v_KD = widened(tl.load(v_ptr + at_KD, mask=is_cached_KD, other=0.0), q_RD.dtype)
        behind_RK = position_R[:, None] - key_K[None, :]
        is_seen_RK = is_key_K[None, :] & (behind_RK >= 0) & (behind_RK < window)
        score_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee") * scale
        if HAS_CAP:
            score_RK = cap - 2.0 * cap / (tl.exp2(score_RK) + 1.0)
        score_RK = tl.where(is_seen_RK, score_RK, float("-inf"))
        new_peak_R = tl.maximum(peak_R, tl.max(score_RK, 1))
        base_R = tl.where(new_peak_R == float("-inf"), 0.0, new_peak_R)
        weight_RK = tl.exp2(score_RK - base_R[:, None])
        fade_R = tl.exp2(peak_R - base_R)
        total_R = total_R * fade_R + tl.sum(weight_RK, 1)
        sum_RD = tl.dot(
            weight_RK.to(q_RD.dtype), v_KD, acc=sum_RD * fade_R[:, None], input_precision="ieee"
        )
        peak_R = new_peak_R

    if partial < 0:
        out_RD = sum_RD / tl.where(is_row_R, total_R, 1.0)[:, None]
        tl.store(out_ptr + at_RD, out_RD.to(q_RD.dtype), mask=is_held_RD)
    else:
        left_R = head_at(partial, row_R - tile_row, 1)
        tl.store(peak_ptr + left_R, peak_R, mask=is_row_R)
        tl.store(total_ptr + left_R, total_R, mask=is_row_R)
        left_RD = left_R[:, None] * HEAD_DIM + dim_D[None, :]
        tl.store(sum_ptr + left_RD, sum_RD, mask=is_held_RD)


@triton.jit
def widened(x_KD, dtype: tl.constexpr):
    """By way of float32 from eight bits: before sm_90 there is no way straight to bfloat16."""
    if tl.constexpr(x_KD.dtype.primitive_bitwidth) == 8:
        x_KD = x_KD.to(tl.float32)
    return x_KD.to(dtype)


@triton.jit
def head_at(first_row, row_R, group):
    """Which head of all rows' heads each flat row is, for the KV head of grid axis 1."""
    head_R = tl.program_id(1) * group + row_R % group
    return (first_row + row_R // group).to(tl.int64) * (tl.num_programs(1) * group) + head_R


@triton.jit
def cached_at(blocks_ptr, key_K, is_key_K, BLOCK_SIZE: tl.constexpr):
    """Which of all cached heads each key has, for the KV head of grid axis 1."""
    block_K = tl.load(blocks_ptr + key_K // BLOCK_SIZE, mask=is_key_K, other=0).to(tl.int64)
    slot_K = block_K * BLOCK_SIZE + key_K % BLOCK_SIZE
    return slot_K * tl.num_programs(1) + tl.program_id(1)


@triton.jit(do_not_specialize=["group"])
def merge_chunks(
    out_ptr,
    merges_ptr,
    peak_ptr,
    total_ptr,
    sum_ptr,
    group,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (Q tiles whose context is cut, M, the most flat rows that one has)."""
    merge_ptr = merges_ptr + tl.program_id(0) * MERGE_STRIDE
    row = tl.program_id(2)
    num_rows = tl.load(merge_ptr + 2)
    if row < num_rows:
        first_row = tl.load(merge_ptr)
        tile_row = tl.load(merge_ptr + 1)
        partial = tl.load(merge_ptr + 3)
        chunk_C = tl.arange(0, CHUNKS)
        dim_D = tl.arange(0, PADDED_DIM)
        is_chunk_C = chunk_C < tl.load(merge_ptr + 4)
        is_held_CD = is_chunk_C[:, None] & (dim_D < HEAD_DIM)[None, :]
        left_C = head_at(partial, row + chunk_C * num_rows, 1)
        left_CD = left_C[:, None] * HEAD_DIM + dim_D[None, :]
        peak_C = tl.load(peak_ptr + left_C, mask=is_chunk_C, other=float("-inf"))
        total_C = tl.load(total_ptr + left_C, mask=is_chunk_C, other=0.0)
        sum_CD = tl.load(sum_ptr + left_CD, mask=is_held_CD, other=0.0)
        weight_C = tl.exp2(peak_C - tl.max(peak_C, 0))
        out_D = tl.sum(sum_CD * weight_C[:, None], 0) / tl.sum(total_C * weight_C, 0)
        out_ptr += head_at(first_row, tile_row + row, group) * HEAD_DIM
        tl.store(out_ptr + dim_D, out_D.to(out_ptr.dtype.element_ty), mask=dim_D < HEAD_DIM)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What a product of query and key is multiplied by, and the cap: both for powers of 2.

    With a cap the first makes e^2x of tanh(x) a power of 2, x being the score by the softcap.
    """
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2.0 * scale / softcap * LOG2_E, softcap * LOG2_E


def tile_constants(
    *, head_dim: int, block_size: int, itemsize: int, has_wide: bool, has_cap: bool
) -> dict[str, int]:
    """What attend_tiles is compiled for, with queries of `itemsize` bytes an element.

    The sizes are such that no register is spilled and 99 KiB of shared memory do. They are
    the same with wide tiles and without, and so are the bits of a narrow one.
    """
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    has_tensor_cores = itemsize < 4
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "BLOCK_SIZE": block_size,
        "NARROW_ROWS": NARROW,
        "WIDE_ROWS": wide_rows(head_dim=head_dim, itemsize=itemsize),
        "KEYS": (32 if has_tensor_cores else 16) * (2 if padded_dim <= 64 else 1),
        "HAS_WIDE": has_wide,
        "HAS_CAP": has_cap,
        "num_warps": 4 if has_tensor_cores and padded_dim <= 128 else 8,
        "enable_fp_fusion": True,
        "num_stages": 2 if has_tensor_cores or padded_dim <= 128 else 3,
    }


def wide_rows(*, head_dim: int, itemsize: int) -> int:
    """Flat rows of a wide tile; fewer in float32, whose products have no tensor cores."""
    return 64 if itemsize < 4 else 32 if head_dim <= 128 else NARROW


def decode_tiles(
    *, group: int, head_dim: int, itemsize: int
) -> Callable[[Sequence[int], Sequence[int]], Tiles] | None:
    """Makes the tables of decodes from starts and numbers of blocks, for such layers.

    None: their heads are the reference's, which reads lengths on the host.
    """
    if head_dim > MAX_HEAD_DIM:
        return None
    wide = wide_rows(head_dim=head_dim, itemsize=itemsize)
    return partial(decode_tiles_of, group=group, wide=wide)


def merge_constants(*, head_dim: int) -> dict[str, int]:
    """What merge_chunks is compiled for."""
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "CHUNKS": MAX_CHUNKS,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def partials(
    num_rows: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the peak, total and sum of each row of a cut context."""
    shape = (num_rows, num_kv_heads)
    empty = partial(torch.empty, dtype=torch.float32, device=device)
    return empty(shape), empty(shape), empty((*shape, head_dim))


class TritonAttention:
    """paged_attention(), for float32, bfloat16 and float16; the reference's for very long heads.

    For the layers of one model: how many query heads share a KV head is the same in all, so
    the tables of a batch are made at its first layer and kept for the others.
    """

    def __init__(self) -> None:
        self._context: AttentionContext | None = None
        self._tables: Tiles

    def __call__(
        self,
        q_TND: torch.Tensor,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See reference.paged_attention."""
        if k_BSMD.shape[3] > MAX_HEAD_DIM:
            return reference.paged_attention(q_TND, k_BSMD, v_BSMD, context, scale, window, softcap)
        q_TND = q_TND.contiguous()
        out_TND = torch.empty_like(q_TND)
        _, block_size, num_kv_heads, head_dim = k_BSMD.shape
        group, itemsize = q_TND.shape[1] // num_kv_heads, q_TND.element_size()
        wide = wide_rows(head_dim=head_dim, itemsize=itemsize)
        tiles = self._tiles(context, group, wide, q_TND.device)
        constants = tile_constants(
            head_dim=head_dim,
            block_size=block_size,
            itemsize=itemsize,
            has_wide=tiles.has_wide,
            has_cap=softcap is not None,
        )
        left = partials(tiles.num_partial_rows, num_kv_heads, head_dim, q_TND.device)
        attend_tiles[len(tiles.tiles), num_kv_heads](
            q_TND,
            k_BSMD,
            v_BSMD,
            out_TND,
            context.flat_blocks,
            tiles.tiles,
            *left,
            *score_factors(scale, softcap),
            window or NO_WINDOW,
            group,
            **constants,
        )
        if len(tiles.merges):
            merge_chunks[len(tiles.merges), num_kv_heads, tiles.max_merged_rows](
                out_TND, tiles.merges, *left, group, **merge_constants(head_dim=head_dim)
            )
        return out_TND

    def _tiles(
        self, context: AttentionContext, group: int, wide: int, device: torch.device
    ) -> Tiles:
        if context.tables is not None:
            assert isinstance(context.tables, Tiles), "they are decode_tiles()'s"
            return context.tables
        if self._context is not context:
            num_blocks = [len(blocks) for blocks in context.blocks]
            lengths = (context.starts, context.lengths, num_blocks)
            self._tables = tiles_of(*lengths, group, wide).on(device)
            self._context = context
        return self._tables
