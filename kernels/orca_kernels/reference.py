"""The readable backend in plain torch: split, attend, merge (Orca §3, S2), and what each row needs.

Every fused kernel is tested against it. Shapes: T rows of the batch, L rows and
C context tokens of one request, H hidden, N query heads, M KV heads, D head size,
B blocks of S slots. Every function treats each row alike whatever the batch, so a
request's bits don't depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from orca_kernels.activation import Activation
from orca_kernels.context import AttentionContext, Rotation

SERIAL_ELEMENTS = 16384  # torch cuts elementwise operations on more over threads, anywhere in a row


def rms_norm(
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    rounds_late: bool = False,
    adds_one: bool = False,
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight, computed in fp32 up to the weight, or with it.

    adds_one: the factor is weight + 1, in fp32 too.
    """
    wide = x_TH.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if not rounds_late:
        normed = normed.to(x_TH.dtype)
    if adds_one:
        weight_H = weight_H.float() + 1.0
    return (weight_H * normed).to(x_TH.dtype)


def add_rms_norm(
    x_TH: torch.Tensor,
    y_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    rounds_late: bool = False,
    adds_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual x + y, rounded, and its rms_norm."""
    sum_TH = x_TH + y_TH
    return sum_TH, rms_norm(sum_TH, weight_H, eps, rounds_late=rounds_late, adds_one=adds_one)


def gate_mul(gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(first half), rounded, * second half."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return _activated(gate, activation) * up


def _activated(x_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
    """In pieces of whole rows on CPU: next to a cut inside a row, torch's round differently."""
    function = silu if activation is Activation.SILU else _gelu_tanh
    if x_TF.is_cuda or x_TF.numel() <= SERIAL_ELEMENTS or torch.get_num_threads() == 1:
        return function(x_TF)
    num_rows = max(1, SERIAL_ELEMENTS // x_TF.shape[1])
    return torch.cat([function(rows) for rows in x_TF.split(num_rows)])


def _gelu_tanh(x_TF: torch.Tensor) -> torch.Tensor:
    return gelu(x_TF, approximate="tanh")


def empty_kv(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for one layer's keys and values, each [B, S, M, D], as these kernels lay it out."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_BSMD, v_BSMD = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    return k_BSMD, v_BSMD


def rotate_and_write(
    q_TND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    rotation: Rotation | None,
    k_BSMD: torch.Tensor,
    v_BSMD: torch.Tensor,
    context: AttentionContext,
) -> torch.Tensor:
    """Rotates q and k, if there is a rotation, and stores k and v; returns q, [T, N, D]."""
    if rotation is not None:
        q_TND, k_TMD = rotate(q_TND, rotation), rotate(k_TMD, rotation)
    write_kv(k_TMD, v_TMD, k_BSMD, v_BSMD, context)
    return q_TND


def rotate(x_TND: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turns each pair (i, i + D / 2) of every head by its angle."""
    cos, sin = rotation
    left, right = x_TND.chunk(2, dim=-1)
    return (x_TND * cos + torch.cat([-right, left], dim=-1) * sin).to(x_TND.dtype)


def write_kv(
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    k_BSMD: torch.Tensor,
    v_BSMD: torch.Tensor,
    context: AttentionContext,
) -> None:
    """Store each row's keys and values in its slot."""
    block_size = k_BSMD.shape[1]
    blocks_T, offsets_T = context.slots_T // block_size, context.slots_T % block_size
    k_BSMD[blocks_T, offsets_T] = k_TMD
    v_BSMD[blocks_T, offsets_T] = v_TMD


def paged_attention(
    q_TND: torch.Tensor,
    k_BSMD: torch.Tensor,
    v_BSMD: torch.Tensor,
    context: AttentionContext,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of every row to its own request's positions; returns [T, N, D].

    With a window, to the last `window` of them: its own and those just before. With a softcap
    a score s counts as softcap * tanh(s / softcap).
    """
    split = q_TND.split(context.lengths)
    merged = [
        attend(
            q_LND,
            gather(k_BSMD, blocks, start + length),
            gather(v_BSMD, blocks, start + length),
            scale,
            window,
            softcap,
        )
        for q_LND, blocks, start, length in zip(
            split, context.blocks, context.starts, context.lengths, strict=True
        )
    ]
    return torch.cat(merged)


def gather(cache_BSMD: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` cached rows of one request, [C, M, D]."""
    num_blocks = -(-num_tokens // cache_BSMD.shape[1])
    return cache_BSMD[blocks[:num_blocks]].flatten(0, 1)[:num_tokens]


def attend(
    q_LND: torch.Tensor,
    k_CMD: torch.Tensor,
    v_CMD: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One request's last L positions against all its C = start + L; returns [L, N, D].

    The query heads of a KV head are laid beside each other, so a decode step is
    a small dense product; longer ones are causal.
    """
    L, N, D = q_LND.shape
    if window is not None:  # nobody sees what lies before the first row's window
        k_CMD, v_CMD = k_CMD[-(L + window - 1) :], v_CMD[-(L + window - 1) :]
    if softcap is not None:
        return _attend_capped(q_LND, k_CMD, v_CMD, scale, window, softcap)
    C, M, _ = k_CMD.shape
    if L == 1:
        out = scaled_dot_product_attention(
            q_LND.view(1, M, N // M, D),
            k_CMD.transpose(0, 1).unsqueeze(0),
            v_CMD.transpose(0, 1).unsqueeze(0),
            scale=scale,
        )
        return out.reshape(1, N, D)
    is_plain = C == L and (window is None or window >= C)
    out = scaled_dot_product_attention(
        q_LND.transpose(0, 1).unsqueeze(0),
        k_CMD.repeat_interleave(N // M, dim=1).transpose(0, 1).unsqueeze(0),
        v_CMD.repeat_interleave(N // M, dim=1).transpose(0, 1).unsqueeze(0),
        attn_mask=None if is_plain else _seen(L, C, window, q_LND.device),
        is_causal=is_plain,
        scale=scale,
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_capped(
    q_LND: torch.Tensor,
    k_CMD: torch.Tensor,
    v_CMD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """Written out, in fp32: torch's own attention has no cap. G query heads share a KV head."""
    L, C, M = len(q_LND), len(k_CMD), k_CMD.shape[1]
    q_LMGD = q_LND.float().unflatten(1, (M, -1))
    score_MGLC = torch.einsum("lmgd,cmd->mglc", q_LMGD, k_CMD.float()) * scale
    score_MGLC = softcap * torch.tanh(score_MGLC / softcap)
    score_MGLC = torch.where(_seen(L, C, window, q_LND.device), score_MGLC, -torch.inf)
    out_LMGD = torch.einsum("mglc,cmd->lmgd", score_MGLC.softmax(-1), v_CMD.float())
    return out_LMGD.flatten(1, 2).to(q_LND.dtype)


def _seen(num_rows: int, num_tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Row i sees the tokens up to position num_tokens - num_rows + i, at most `window`."""
    last = num_tokens - num_rows
    seen = torch.ones(num_rows, num_tokens, dtype=torch.bool, device=device).tril(last)
    return seen if window is None else seen.triu(last - window + 1)
