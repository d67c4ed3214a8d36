"""The C++ matmul: weights in panels, in bfloat16 wherever that loses nothing.

A row's bits don't depend on the batch or the number of threads, nor on how the
weights are kept.
"""

from __future__ import annotations

import ctypes

import torch

from orca_kernels.cpu.tape import Kernel

PANEL = 32  # outputs; linear.cpp's kPanel
MIN_THREADED_WEIGHTS = 100_000  # fewer aren't worth waking a thread for


class CpuLinear:
    """y = x W^T + b, for x in float32 or bfloat16."""

    def __init__(
        self,
        library: ctypes.CDLL,
        num_threads: int,
        weight_FK: torch.Tensor,
        bias_F: torch.Tensor | None = None,
    ) -> None:
        integers, pointers = [ctypes.c_int64] * 4, [ctypes.c_void_p] * 4
        self._kernel = Kernel(library, "orca_linear", *integers[:2], *pointers, *integers)
        self.num_outputs, self.num_inputs = weight_FK.shape
        self.panels_PKO = in_panels(shortened(weight_FK))
        self.bias_F = None if bias_F is None else bias_F.float()
        self._num_threads = num_threads if weight_FK.numel() >= MIN_THREADED_WEIGHTS else 1

    @property
    def nbytes(self) -> int:
        return self.panels_PKO.nbytes + (0 if self.bias_F is None else self.bias_F.nbytes)

    def keeps(self, weight_FK: torch.Tensor) -> bool:
        """It never does."""
        return False

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, F]."""
        x_TK = x_TK.contiguous()
        num_rows = x_TK.shape[0]
        y_TF = x_TK.new_empty(num_rows, self.num_outputs)
        self._kernel(
            x_TK.dtype is torch.bfloat16,
            self.panels_PKO.dtype is torch.bfloat16,
            x_TK.data_ptr(),
            self.panels_PKO.data_ptr(),
            None if self.bias_F is None else self.bias_F.data_ptr(),
            y_TF.data_ptr(),
            num_rows,
            self.num_inputs,
            self.num_outputs,
            self._num_threads,
        )
        return y_TF


def shortened(weight: torch.Tensor) -> torch.Tensor:
    """In bfloat16 where that holds every value exactly, as it does those of most checkpoints."""
    short = weight.bfloat16()
    return short if torch.equal(short.to(weight.dtype), weight) else weight


def in_panels(weight_FK: torch.Tensor) -> torch.Tensor:
    """[panels, K, PANEL], outputs beyond the last being zeros."""
    num_outputs, num_inputs = weight_FK.shape
    num_panels = -(-num_outputs // PANEL)
    padded = weight_FK.new_zeros(num_panels * PANEL, num_inputs)
    padded[:num_outputs] = weight_FK
    return padded.view(num_panels, PANEL, num_inputs).transpose(1, 2).contiguous()
