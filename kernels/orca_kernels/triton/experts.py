"""A mixture of experts on CUDA devices: an expert multiplies the rows that chose it, and no others.

What orca_kernels.experts says, in the time that the chosen experts take. The pairs (row, choice)
are sorted by expert on the device. A program takes a tile of one expert's pairs and a piece of its
columns; which, it works out from where each expert's pairs end. There are as many programs as the
worst router could need, and those that are too many end at once: no shape depends on the router
and the host reads nothing, so launches can be captured.

Three launches: gate, up and activation; down; and the sum of a row's choices in their order. What
the reference rounds is rounded here. Nothing is added up in memory by several programs at once, so
the bits are the same in every run.

Shapes: T rows, K choices of each, P = T * K pairs, H hidden, E experts, F the width of one; in a
program R pairs of a tile, C columns, D elements of a step, X experts (a power of two).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orca_kernels.activation import Activation
from orca_kernels.triton.rows import activated

NARROW, WIDE = 16, 64  # pairs of a tile; the fewest that tensor cores take
SUM_COLUMNS = 1024


@triton.jit
def gate_up_tiles(
    x_ptr,
    order_ptr,
    ends_ptr,
    gate_up_ptr,
    gated_ptr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Grid (tiles, pieces of COLUMNS of WIDTH): a row for each pair, in their sorted order."""
    expert, first, end = find_tile(ends_ptr, EXPERTS, PADDED_EXPERTS, ROWS)
    if expert < EXPERTS:
        pair_R = first + tl.arange(0, ROWS)
        is_pair_R = pair_R < end
        row_R = tl.load(order_ptr + pair_R, mask=is_pair_R, other=0) // CHOICES
        column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column_C = column_C < WIDTH
        gate_ptr = gate_up_ptr + expert.to(tl.int64) * (2 * WIDTH * HIDDEN)
        up_ptr = gate_ptr + WIDTH * HIDDEN
        gate_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
        up_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, HIDDEN, DEPTH):
            x_RD = loaded(x_ptr, row_R, is_pair_R, start, HIDDEN, DEPTH)
            gate_CD = loaded(gate_ptr, column_C, is_column_C, start, HIDDEN, DEPTH)
            up_CD = loaded(up_ptr, column_C, is_column_C, start, HIDDEN, DEPTH)
            gate_RC = tl.dot(x_RD, tl.trans(gate_CD), acc=gate_RC, input_precision="ieee")
            up_RC = tl.dot(x_RD, tl.trans(up_CD), acc=up_RC, input_precision="ieee")
        dtype = gated_ptr.dtype.element_ty
        gate_RC = activated(gate_RC.to(dtype).to(tl.float32), IS_GELU).to(dtype).to(tl.float32)
        gated_RC = (gate_RC * up_RC.to(dtype).to(tl.float32)).to(dtype)
        at_RC = pair_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
        tl.store(gated_ptr + at_RC, gated_RC, mask=is_pair_R[:, None] & is_column_C[None, :])


@triton.jit
def down_tiles(
    gated_ptr,
    order_ptr,
    ends_ptr,
    down_ptr,
    y_ptr,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (tiles, pieces of COLUMNS of HIDDEN): a row for each pair, where the pair stands."""
    expert, first, end = find_tile(ends_ptr, EXPERTS, PADDED_EXPERTS, ROWS)
    if expert < EXPERTS:
        pair_R = first + tl.arange(0, ROWS)
        is_pair_R = pair_R < end
        column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column_C = column_C < HIDDEN
        down_ptr += expert.to(tl.int64) * (HIDDEN * WIDTH)
        y_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            gated_RD = loaded(gated_ptr, pair_R, is_pair_R, start, WIDTH, DEPTH)
            down_CD = loaded(down_ptr, column_C, is_column_C, start, WIDTH, DEPTH)
            y_RC = tl.dot(gated_RD, tl.trans(down_CD), acc=y_RC, input_precision="ieee")
        pair_R = tl.load(order_ptr + pair_R, mask=is_pair_R, other=0)
        at_RC = pair_R[:, None] * HIDDEN + column_C[None, :]
        is_held_RC = is_pair_R[:, None] & is_column_C[None, :]
        tl.store(y_ptr + at_RC, y_RC.to(y_ptr.dtype.element_ty), mask=is_held_RC)


@triton.jit
def sum_choices(
    y_ptr,
    weight_ptr,
    out_ptr,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (T, pieces of COLUMNS of HIDDEN)."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_held_C = column_C < HIDDEN
    sum_C = tl.zeros([COLUMNS], tl.float32)
    for choice in range(CHOICES):
        pair = row * CHOICES + choice
        y_C = tl.load(y_ptr + pair * HIDDEN + column_C, mask=is_held_C, other=0.0)
        sum_C += tl.load(weight_ptr + pair) * y_C.to(tl.float32)
    out_C = sum_C.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HIDDEN + column_C, out_C, mask=is_held_C)


@triton.jit
def find_tile(ends_ptr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of this program's tile, its first pair and the expert's end; EXPERTS: of nobody.

    Each expert has as many tiles as its pairs fill, and they are laid end to end.
    """
    expert_X = tl.arange(0, PADDED_EXPERTS)
    is_expert_X = expert_X < EXPERTS
    end_X = tl.load(ends_ptr + expert_X, mask=is_expert_X, other=0).to(tl.int32)
    is_later_X = is_expert_X & (expert_X > 0)
    begin_X = tl.load(ends_ptr + expert_X - 1, mask=is_later_X, other=0).to(tl.int32)
    num_tiles_X = tl.where(is_expert_X, (end_X - begin_X + ROWS - 1) // ROWS, 0)
    end_tile_X = tl.cumsum(num_tiles_X, 0)
    tile = tl.program_id(0)
    expert = tl.sum((is_expert_X & (end_tile_X <= tile)).to(tl.int32), 0)
    is_it_X = expert_X == expert
    first_tile = tl.sum(tl.where(is_it_X, end_tile_X - num_tiles_X, 0), 0)
    first = tl.sum(tl.where(is_it_X, begin_X, 0), 0) + (tile - first_tile) * ROWS
    return expert, first, tl.sum(tl.where(is_it_X, end_X, 0), 0)


@triton.jit
def loaded(ptr, row_R, is_row_R, start, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Elements from `start` on of some rows of SIZE: [R, D], zeros past the end."""
    depth_D = start + tl.arange(0, DEPTH)
    at_RD = row_R.to(tl.int64)[:, None] * SIZE + depth_D[None, :]
    return tl.load(ptr + at_RD, mask=is_row_R[:, None] & (depth_D < SIZE)[None, :], other=0.0)


def tile_rows(*, num_pairs: int, num_experts: int, itemsize: int) -> int:
    """Pairs of a tile: few where an expert has few, and in float32, without tensor cores."""
    wide = WIDE if itemsize < 4 else 2 * NARROW
    return NARROW if num_pairs <= NARROW * num_experts else wide


def tile_constants(*, num_experts: int, rows: int, itemsize: int) -> dict[str, int]:
    """What both kernels of tiles are compiled for; 99 KiB of shared memory do, and none spills."""
    has_tensor_cores = itemsize < 4
    return {
        "EXPERTS": num_experts,
        "PADDED_EXPERTS": triton.next_power_of_2(num_experts),
        "ROWS": rows,
        "COLUMNS": 64,
        "DEPTH": 64 if has_tensor_cores else 16,
        "num_warps": 4 if has_tensor_cores or rows == NARROW else 8,
        "num_stages": 3,
        "enable_fp_fusion": True,
    }


def sum_constants(*, hidden: int, num_choices: int) -> dict[str, int]:
    """What sum_choices is compiled for."""
    return {
        "CHOICES": num_choices,
        "HIDDEN": hidden,
        "COLUMNS": min(SUM_COLUMNS, triton.next_power_of_2(hidden)),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


class TritonExperts:
    """The experts of one layer, in float32, bfloat16 or float16.

    gate_up [E, 2F, H], down [E, H, F].
    """

    def __init__(
        self, gate_up_EFH: torch.Tensor, down_EHF: torch.Tensor, activation: Activation
    ) -> None:
        self._gate_up_EFH = gate_up_EFH.contiguous()
        self._down_EHF = down_EHF.contiguous()
        self._is_gelu = activation is Activation.GELU_TANH

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return self._gate_up_EFH.nbytes + self._down_EHF.nbytes

    def __call__(
        self, x_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """Sum of weight * expert(x) over the choices of each row: [T, H]. See experts.experts."""
        x_TH, weight_TK = x_TH.contiguous(), weight_TK.contiguous()
        num_rows, num_choices = expert_TK.shape
        num_experts, hidden, width = self._down_EHF.shape
        num_pairs, itemsize = num_rows * num_choices, x_TH.element_size()
        sorted_P, order_P = expert_TK.flatten().sort(stable=True)
        expert_E = torch.arange(num_experts, device=x_TH.device)
        ends_E = torch.searchsorted(sorted_P, expert_E, right=True)
        rows = tile_rows(num_pairs=num_pairs, num_experts=num_experts, itemsize=itemsize)
        constants = tile_constants(num_experts=num_experts, rows=rows, itemsize=itemsize)
        sizes = {"HIDDEN": hidden, "WIDTH": width}
        num_tiles = min(num_pairs, triton.cdiv(num_pairs, rows) + num_experts)
        gated_PF = x_TH.new_empty(num_pairs, width)
        gate_up_tiles[num_tiles, triton.cdiv(width, constants["COLUMNS"])](
            x_TH,
            order_P,
            ends_E,
            self._gate_up_EFH,
            gated_PF,
            CHOICES=num_choices,
            IS_GELU=self._is_gelu,
            **sizes,
            **constants,
        )
        y_PH = x_TH.new_empty(num_pairs, hidden)
        down_tiles[num_tiles, triton.cdiv(hidden, constants["COLUMNS"])](
            gated_PF, order_P, ends_E, self._down_EHF, y_PH, **sizes, **constants
        )
        return summed(y_PH, weight_TK)


def summed(y_PH: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    """Each row's weighted choices in their order, in float32: [T, H]."""
    (num_rows, num_choices), hidden = weight_TK.shape, y_PH.shape[1]
    out_TH = y_PH.new_empty(num_rows, hidden)
    constants = sum_constants(hidden=hidden, num_choices=num_choices)
    sum_choices[num_rows, triton.cdiv(hidden, constants["COLUMNS"])](
        y_PH, weight_TK, out_TH, **constants
    )
    return out_TH
