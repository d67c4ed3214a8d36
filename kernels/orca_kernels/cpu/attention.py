"""The C++ attention kernel behind the same signature as the torch reference.

A row's bits depend on its position, the block size and the window alone: not on the
batch, on where a prompt is cut, or on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from orca_kernels.context import AttentionContext
from orca_kernels.cpu.build import load_library

SOURCE = Path(__file__).with_name("attention.cpp")
DTYPES = (torch.float32, torch.bfloat16)
MIN_THREADED_COST = 200_000  # query rows times keys; less isn't worth waking a thread for


class CpuAttention:
    """paged_attention() as the kernel computes it; made once, by make_cpu_attention()."""

    def __init__(self, kernel: Callable[..., None], num_threads: int) -> None:
        self._kernel = kernel
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(1, num_threads - 1), "attention")

    def __call__(
        self,
        q_TND: torch.Tensor,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        q_TND = q_TND.contiguous()
        out_TND = torch.empty_like(q_TND)
        table, blocks = context.table, context.flat_blocks
        arguments = (
            int(q_TND.dtype is torch.bfloat16),
            *(tensor.data_ptr() for tensor in (q_TND, k_BSMD, v_BSMD, out_TND, table)),
            len(table),
            blocks.data_ptr(),
            q_TND.shape[1],
            k_BSMD.shape[2],
            k_BSMD.shape[3],
            k_BSMD.shape[1],
            window or 0,
            scale,
        )
        is_dear = context.num_pairs * q_TND.shape[1] >= MIN_THREADED_COST
        self._run(arguments, self._num_threads if is_dear else 1)
        return out_TND

    def _run(self, arguments: tuple[object, ...], num_threads: int) -> None:
        """Every thread calls the kernel, which finds its share by its number."""
        others = [
            self._pool.submit(self._kernel, *arguments, thread, num_threads)
            for thread in range(1, num_threads)
        ]
        self._kernel(*arguments, 0, num_threads)
        for other in others:
            other.result()


def make_cpu_attention(num_threads: int) -> CpuAttention:
    """Compiles and loads the kernel; raises BuildError where that can't be done."""
    kernel = load_library(SOURCE).orca_paged_attention
    pointers, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 5
    kernel.argtypes = [
        ctypes.c_int64,
        *pointers,
        ctypes.c_int64,
        ctypes.c_void_p,
        *sizes,
        ctypes.c_float,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    kernel.restype = None
    return CpuAttention(kernel, num_threads)
