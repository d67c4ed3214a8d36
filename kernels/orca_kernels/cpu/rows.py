"""The C++ kernels for what is done to each row alone, as the torch reference does it.

A row's bits depend on that row only.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from orca_kernels.activation import Activation
from orca_kernels.context import AttentionContext, Rotation
from orca_kernels.cpu.tape import Kernel

MIN_THREADED_ELEMENTS = 100_000  # fewer aren't worth waking a thread for


class CpuRows:
    """Norms, gate_mul and rotate_and_write, for float32 and bfloat16."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        size, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        weighting = (size, size, real, size, real, size)
        kernel = partial(Kernel, library)
        self._norm = kernel("orca_rms_norm", size, *[pointer] * 3, *weighting)
        self._add_norm = kernel("orca_add_rms_norm", size, *[pointer] * 5, *weighting)
        self._gate = kernel("orca_gate_mul", size, size, pointer, pointer, size, size, size)
        row_tables = (*[pointer] * 3, *[size] * 3, *[pointer] * 6)
        self._rotate = kernel("orca_rotate_and_write", size, size, *row_tables, *[size] * 6)
        self._num_threads = num_threads

    def rms_norm(
        self,
        x: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        rounds_late: bool = False,
        adds_one: bool = False,
    ) -> torch.Tensor:
        """See reference.rms_norm."""
        x = x.contiguous()
        y = torch.empty_like(x)
        hidden = x.shape[-1]
        self._norm(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            weight_H.data_ptr(),
            y.data_ptr(),
            x.numel() // hidden,
            hidden,
            eps,
            rounds_late,
            float(adds_one),
            self._threads(x),
        )
        return y

    def add_rms_norm(
        self,
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
        self._add_norm(
            x_TH.dtype is torch.bfloat16,
            *(tensor.data_ptr() for tensor in (x_TH, y_TH, weight_H, sum_TH, normed_TH)),
            *x_TH.shape,
            eps,
            rounds_late,
            float(adds_one),
            self._threads(x_TH),
        )
        return sum_TH, normed_TH

    def gate_mul(self, gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See reference.gate_mul."""
        gate_up_TF = gate_up_TF.contiguous()
        num_rows, num_both = gate_up_TF.shape
        y_TF = gate_up_TF.new_empty(num_rows, num_both // 2)
        self._gate(
            gate_up_TF.dtype is torch.bfloat16,
            activation is Activation.GELU_TANH,
            gate_up_TF.data_ptr(),
            y_TF.data_ptr(),
            num_rows,
            num_both // 2,
            self._threads(gate_up_TF),
        )
        return y_TF

    def rotate_and_write(
        self,
        q_TND: torch.Tensor,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
        rotation: Rotation | None,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """See reference.rotate_and_write; the caches are those of empty_kv()."""
        q_TND, k_TMD, v_TMD = map(_rows, (q_TND, k_TMD, v_TMD))
        num_rows, num_heads, head_dim = q_TND.shape
        out_TND = q_TND.new_empty(num_rows, num_heads, head_dim)
        self._rotate(
            q_TND.dtype is torch.bfloat16,
            rotation is not None and rotation[0].dtype is torch.bfloat16,
            *(tensor.data_ptr() for tensor in (q_TND, k_TMD, v_TMD)),
            *(tensor.stride(0) for tensor in (q_TND, k_TMD, v_TMD)),
            *((None, None) if rotation is None else (table.data_ptr() for table in rotation)),
            *(tensor.data_ptr() for tensor in (context.slots_T, out_TND, k_BSMD, v_BSMD)),
            num_rows,
            num_heads,
            k_TMD.shape[1],
            head_dim,
            k_BSMD.shape[1],
            self._threads(q_TND),
        )
        return out_TND

    def _threads(self, x: torch.Tensor) -> int:
        return self._num_threads if x.numel() >= MIN_THREADED_ELEMENTS else 1


def _rows(x_TND: torch.Tensor) -> torch.Tensor:
    """With the heads of a row back to back; rows may lie apart."""
    is_whole = x_TND.stride(2) == 1 and x_TND.stride(1) == x_TND.shape[2]
    return x_TND if is_whole else x_TND.contiguous()
