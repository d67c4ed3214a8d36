"""The C++ attention kernel behind the same signature as the torch reference.

A row's bits depend on its position, the block size and the window alone: not on the
batch, on where a prompt is cut, or on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from orca_kernels.context import AttentionContext
from orca_kernels.cpu.tape import Kernel


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


@dataclass(frozen=True, slots=True)
class CpuDecodeTables:
    """The kernel's table of requests, int64 [R, 4]: see AttentionContext.table."""

    table_R4: torch.Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return ()

    def packed(self) -> torch.Tensor:
        return self.table_R4.flatten()

    def over(self, packed_N: torch.Tensor) -> CpuDecodeTables:
        return CpuDecodeTables(packed_N.view(-1, 4))


def decode_tables(
    *, group: int, head_dim: int, itemsize: int
) -> Callable[[Sequence[int], Sequence[int]], CpuDecodeTables]:
    """The same for all heads."""
    return _tables_of_decodes


def _tables_of_decodes(starts: Sequence[int], num_blocks: Sequence[int]) -> CpuDecodeTables:
    first_blocks = [0, *accumulate(num_blocks)]
    rows = zip(range(len(starts)), starts, [1] * len(starts), first_blocks, strict=False)
    return CpuDecodeTables(torch.tensor(list(rows)))


class CpuAttention:
    """paged_attention() as the kernel computes it, for float32 and bfloat16."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        pointers, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 5
        self._kernel = Kernel(
            library,
            "orca_paged_attention",
            *(ctypes.c_int64, *pointers),
            *(ctypes.c_int64, ctypes.c_void_p),
            *sizes,
            *[ctypes.c_float] * 2,
            ctypes.c_int64,
        )
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
        table_R4 = _table(context)
        self._kernel(
            q_TND.dtype is torch.bfloat16,
            q_TND.data_ptr(),
            k_BSMD.data_ptr(),
            v_BSMD.data_ptr(),
            out_TND.data_ptr(),
            table_R4.data_ptr(),
            table_R4.shape[0],
            context.flat_blocks.data_ptr(),
            q_TND.shape[1],
            k_BSMD.shape[2],
            k_BSMD.shape[3],
            k_BSMD.shape[1],
            window or 0,
            scale,
            softcap or 0.0,
            self._num_threads,
        )
        return out_TND


def _table(context: AttentionContext) -> torch.Tensor:
    if context.tables is None:
        return context.table
    assert isinstance(context.tables, CpuDecodeTables), "they are decode_tables()'s"
    return context.tables.table_R4
