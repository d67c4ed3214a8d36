"""The C++ attention kernel behind the same signature as the torch reference.

A row's bits depend on its position, the block size and the window alone: not on the
batch, on where a prompt is cut, or on the number of threads.
"""

from __future__ import annotations

import ctypes

import torch

from orca_kernels.context import AttentionContext

MIN_THREADED_COST = 200_000  # query rows times keys; less isn't worth waking a thread for


def empty_kv(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.empty_kv. In memory keys are [B, M, D, S] and values [B, M, S, D]."""
    k_BMDS = torch.empty(num_blocks, num_kv_heads, head_dim, block_size, dtype=dtype, device=device)
    v_BMSD = torch.empty(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
    return k_BMDS.permute(0, 3, 1, 2), v_BMSD.permute(0, 2, 1, 3)


class CpuAttention:
    """paged_attention() as the kernel computes it, for float32 and bfloat16."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        pointers, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 5
        self._kernel = library.orca_paged_attention
        self._kernel.argtypes = [
            ctypes.c_int64,
            *pointers,
            ctypes.c_int64,
            ctypes.c_void_p,
            *sizes,
            *[ctypes.c_float] * 2,
            ctypes.c_int64,
        ]
        self._kernel.restype = None
        self._num_threads = num_threads

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
        if k_BSMD.stride(1) != 1 or v_BSMD.stride(3) != 1:
            raise ValueError("these kernels read keys and values as empty_kv() lays them out")
        q_TND = q_TND.contiguous()
        out_TND = torch.empty_like(q_TND)
        table, blocks = context.table, context.flat_blocks
        is_dear = context.num_pairs * q_TND.shape[1] >= MIN_THREADED_COST
        self._kernel(
            q_TND.dtype is torch.bfloat16,
            *(tensor.data_ptr() for tensor in (q_TND, k_BSMD, v_BSMD, out_TND, table)),
            len(table),
            blocks.data_ptr(),
            q_TND.shape[1],
            k_BSMD.shape[2],
            k_BSMD.shape[3],
            k_BSMD.shape[1],
            window or 0,
            scale,
            softcap or 0.0,
            self._num_threads if is_dear else 1,
        )
        return out_TND
