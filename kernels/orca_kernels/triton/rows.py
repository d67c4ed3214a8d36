"""What is done to each row alone: norm, gate, rotation and the writing of KV.

Rounding is the reference's, but that a rotation rounds once. A row's bits depend on that
row only. Every kernel computes in float32.

Shapes: T rows of the batch, H hidden, F both halves of an MLP, N query heads, M KV heads,
D head size, B blocks of S slots; in a program R rows, C columns, I pairs of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orca_kernels.activation import Activation
from orca_kernels.context import AttentionContext, Rotation

PROGRAM_ELEMENTS = 4096  # of rows that are short; a long row has a program of its own
GATE_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x_ptr,
    added_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    num_rows,
    row_stride,
    eps,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    ROUNDS_LATE: tl.constexpr,
    ADDS_ONE: tl.constexpr,
):
    """Rows of SIZE elements: PARTS of them back to back, and such groups `row_stride` apart.

    Of x, or of the sum of x and what is added, which is kept.
    """
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, COLUMNS)
    is_held_RC = (row_R < num_rows)[:, None] & (column_C < SIZE)[None, :]
    first_R = row_R // PARTS * row_stride + row_R % PARTS * SIZE
    x_RC = tl.load(x_ptr + first_R[:, None] + column_C[None, :], mask=is_held_RC, other=0.0)
    packed_RC = row_R[:, None] * SIZE + column_C[None, :]
    if IS_ADDED:
        added_RC = tl.load(added_ptr + packed_RC, mask=is_held_RC, other=0.0)
        x_RC = (x_RC.to(tl.float32) + added_RC.to(tl.float32)).to(x_RC.dtype)
        tl.store(sum_ptr + packed_RC, x_RC, mask=is_held_RC)
    wide_RC = x_RC.to(tl.float32)
    mean_R = tl.sum(wide_RC * wide_RC, 1) / SIZE
    normed_RC = wide_RC * tl.rsqrt(mean_R + eps)[:, None]
    if not ROUNDS_LATE:
        normed_RC = normed_RC.to(x_RC.dtype).to(tl.float32)
    weight_C = tl.load(weight_ptr + column_C, mask=column_C < SIZE, other=0.0).to(tl.float32)
    if ADDS_ONE:
        weight_C += 1.0
    y_RC = (weight_C[None, :] * normed_RC).to(x_RC.dtype)
    tl.store(y_ptr + packed_RC, y_RC, mask=is_held_RC)


@triton.jit
def gate_rows(gate_up_ptr, y_ptr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, IS_GELU: tl.constexpr):
    """Grid (T, pieces of COLUMNS of a row's SIZE results)."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_held_C = column_C < SIZE
    gate_ptr = gate_up_ptr + row * (2 * SIZE)
    gate_C = tl.load(gate_ptr + column_C, mask=is_held_C, other=0.0)
    up_C = tl.load(gate_ptr + SIZE + column_C, mask=is_held_C, other=0.0).to(tl.float32)
    gated_C = activated(gate_C.to(tl.float32), IS_GELU).to(gate_C.dtype).to(tl.float32)
    tl.store(y_ptr + row * SIZE + column_C, (gated_C * up_C).to(gate_C.dtype), mask=is_held_C)


@triton.jit
def activated(gate, IS_GELU: tl.constexpr):
    """SiLU of a gate in float32, or GELU's tanh form.

    Both are g / (1 + e^-z), with GELU's g / 2 * (1 + tanh(z / 2)) written as that.
    """
    z = gate
    if IS_GELU:
        z = (gate + gate * gate * gate * 0.044715) * 1.5957691216
    return gate / (1.0 + tl.exp(-z))


@triton.jit
def rotate_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_stride,
    k_stride,
    v_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_ROTATED: tl.constexpr,
):
    """Grid (T, 3): a row's queries, its keys or its values, in heads of 2 * HALF elements."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    cos_ptr += row * (2 * HALF)
    sin_ptr += row * (2 * HALF)
    cached = slot * (NUM_KV_HEADS * 2 * HALF)
    # fmt: off
    if tl.program_id(1) == 0:
        rotate_heads(
            q_ptr + row * q_stride, cos_ptr, sin_ptr, out_ptr + row * (NUM_HEADS * 2 * HALF),
            NUM_HEADS, HEADS, HALF, PAIRS, IS_ROTATED,
        )
    elif tl.program_id(1) == 1:
        rotate_heads(
            k_ptr + row * k_stride, cos_ptr, sin_ptr, k_cache_ptr + cached,
            NUM_KV_HEADS, KV_HEADS, HALF, PAIRS, IS_ROTATED,
        )
    else:
        rotate_heads(
            v_ptr + row * v_stride, cos_ptr, sin_ptr, v_cache_ptr + cached,
            NUM_KV_HEADS, KV_HEADS, HALF, PAIRS, False,
        )
    # fmt: on


@triton.jit
def rotate_heads(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_ROTATED: tl.constexpr,
):
    """Turns the pairs (i, i + HALF) of each head of one row, and rounds to what y holds."""
    head_N = tl.arange(0, HEADS)
    pair_I = tl.arange(0, PAIRS)
    is_held_NI = (head_N < NUM_HEADS)[:, None] & (pair_I < HALF)[None, :]
    at_NI = head_N[:, None] * (2 * HALF) + pair_I[None, :]
    left_NI = tl.load(x_ptr + at_NI, mask=is_held_NI, other=0.0)
    right_NI = tl.load(x_ptr + HALF + at_NI, mask=is_held_NI, other=0.0)
    if IS_ROTATED:
        is_pair_I = pair_I < HALF
        cos_I = tl.load(cos_ptr + pair_I, mask=is_pair_I, other=0.0).to(tl.float32)[None, :]
        sin_I = tl.load(sin_ptr + pair_I, mask=is_pair_I, other=0.0).to(tl.float32)[None, :]
        a_NI, b_NI = left_NI.to(tl.float32), right_NI.to(tl.float32)
        left_NI = (a_NI * cos_I - b_NI * sin_I).to(left_NI.dtype)
        right_NI = (b_NI * cos_I + a_NI * sin_I).to(right_NI.dtype)
    tl.store(y_ptr + at_NI, left_NI.to(y_ptr.dtype.element_ty), mask=is_held_NI)
    tl.store(y_ptr + HALF + at_NI, right_NI.to(y_ptr.dtype.element_ty), mask=is_held_NI)


def rms_norm(
    x: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    rounds_late: bool = False,
    adds_one: bool = False,
) -> torch.Tensor:
    """See reference.rms_norm; the heads of a row may be rows here, as a part of a wider one."""
    x, parts, row_stride = _parts(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    constants = norm_constants(
        size=x.shape[-1],
        parts=parts,
        is_added=False,
        rounds_late=rounds_late,
        adds_one=adds_one,
    )
    num_rows = x.numel() // x.shape[-1]
    grid = (triton.cdiv(num_rows, constants["ROWS"]),)
    norm_rows[grid](x, x, weight_H, y, y, num_rows, row_stride, eps, **constants)
    return y


def add_rms_norm(
    x_TH: torch.Tensor,
    y_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    rounds_late: bool = False,
    adds_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm."""
    x_TH, y_TH = x_TH.contiguous(), y_TH.contiguous()
    sum_TH, normed_TH = torch.empty_like(x_TH), torch.empty_like(x_TH)
    num_rows, size = x_TH.shape
    constants = norm_constants(
        size=size, parts=1, is_added=True, rounds_late=rounds_late, adds_one=adds_one
    )
    grid = (triton.cdiv(num_rows, constants["ROWS"]),)
    norm_rows[grid](x_TH, y_TH, weight_H, sum_TH, normed_TH, num_rows, size, eps, **constants)
    return sum_TH, normed_TH


def norm_constants(
    *, size: int, parts: int, is_added: bool, rounds_late: bool, adds_one: bool
) -> dict[str, int]:
    """What norm_rows is compiled for; a long row is read by more warps."""
    columns = triton.next_power_of_2(size)
    return {
        "SIZE": size,
        "PARTS": parts,
        "ROWS": max(1, PROGRAM_ELEMENTS // columns),
        "COLUMNS": columns,
        "IS_ADDED": is_added,
        "ROUNDS_LATE": rounds_late,
        "ADDS_ONE": adds_one,
        "num_warps": min(16, max(4, columns // 1024)),
        "enable_fp_fusion": True,
    }


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """x, copied if need be; how many rows lie back to back, and how far such groups are apart."""
    size = x.shape[-1]
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size:
        return x, x.shape[1], x.stride(0)
    return x.contiguous(), 1, size


def gate_mul(gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See reference.gate_mul."""
    gate_up_TF = gate_up_TF.contiguous()
    num_rows, num_both = gate_up_TF.shape
    size = num_both // 2
    y_TF = gate_up_TF.new_empty(num_rows, size)
    constants = gate_constants(size=size, activation=activation)
    gate_rows[num_rows, triton.cdiv(size, constants["COLUMNS"])](gate_up_TF, y_TF, **constants)
    return y_TF


def gate_constants(*, size: int, activation: Activation) -> dict[str, int]:
    """What gate_rows is compiled for."""
    return {
        "SIZE": size,
        "COLUMNS": GATE_COLUMNS,
        "IS_GELU": activation is Activation.GELU_TANH,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def rotate_and_write(
    q_TND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    rotation: Rotation | None,
    k_BSMD: torch.Tensor,
    v_BSMD: torch.Tensor,
    context: AttentionContext,
) -> torch.Tensor:
    """See reference.rotate_and_write."""
    q_TND, k_TMD, v_TMD = (_with_heads_together(x) for x in (q_TND, k_TMD, v_TMD))
    num_rows, num_heads, head_dim = q_TND.shape
    out_TND = q_TND.new_empty(num_rows, num_heads, head_dim)
    cos, sin = rotation or (q_TND, q_TND)  # not read where there is none
    rotate_rows[num_rows, 3](
        q_TND,
        k_TMD,
        v_TMD,
        cos,
        sin,
        context.slots_T,
        out_TND,
        k_BSMD,
        v_BSMD,
        q_TND.stride(0),
        k_TMD.stride(0),
        v_TMD.stride(0),
        **rotation_constants(
            num_heads=num_heads,
            num_kv_heads=k_TMD.shape[1],
            head_dim=head_dim,
            is_rotated=rotation is not None,
        ),
    )
    return out_TND


def rotation_constants(
    *, num_heads: int, num_kv_heads: int, head_dim: int, is_rotated: bool
) -> dict[str, int]:
    """What rotate_rows is compiled for; so many warps that a row's queries fit into registers."""
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEADS": triton.next_power_of_2(num_heads),
        "KV_HEADS": triton.next_power_of_2(num_kv_heads),
        "HALF": head_dim // 2,
        "PAIRS": triton.next_power_of_2(head_dim // 2),
        "IS_ROTATED": is_rotated,
        "num_warps": 4 if num_heads * head_dim <= 2 * PROGRAM_ELEMENTS else 8,
        "enable_fp_fusion": True,
    }


def _with_heads_together(x_TND: torch.Tensor) -> torch.Tensor:
    """The heads of a row back to back; rows may lie apart."""
    is_so = x_TND.stride(2) == 1 and x_TND.stride(1) == x_TND.shape[2]
    return x_TND if is_so else x_TND.contiguous()
