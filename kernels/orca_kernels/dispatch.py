"""Which kernels serve a device: C++ on CPUs, Triton on GPUs, plain torch where that can't be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from orca_kernels import reference, sample
from orca_kernels.activation import Activation
from orca_kernels.context import AttentionContext, DecodeTables, Rotation
from orca_kernels.cpu import sample as cpu_sample
from orca_kernels.cpu.attention import CpuAttention, decode_tables, empty_kv
from orca_kernels.cpu.build import BuildError, load_library
from orca_kernels.cpu.experts import CpuExperts
from orca_kernels.cpu.linear import CpuLinear
from orca_kernels.cpu.rows import CpuRows
from orca_kernels.cpu.tape import Work, capture
from orca_kernels.experts import Matrices, TorchExperts, of_stacks
from orca_kernels.flash_infer import FlashInferAttention
from orca_kernels.linear import TorchLinear

log = logging.getLogger(__name__)

CPU_DTYPES = (torch.float32, torch.bfloat16)
MIN_CAPABILITY = (8, 0)  # of a CUDA device: what the Triton kernels are compiled for


class Linear(Protocol):
    """y = x W^T + b: [T, K] -> [T, F]. `nbytes`: of weight and bias, as they are kept."""

    @property
    def nbytes(self) -> int: ...

    def keeps(self, weight_FK: torch.Tensor) -> bool:
        """Whether it is this very tensor that it keeps, and not the same in its own layout."""
        ...

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor: ...


class MakeLinear(Protocol):
    """Takes a weight [F, K] and a bias [F], and keeps what it needs of them."""

    def __call__(self, weight_FK: torch.Tensor, bias_F: torch.Tensor | None = None) -> Linear: ...


class RmsNorm(Protocol):
    """See reference.rms_norm."""

    def __call__(
        self,
        x: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        rounds_late: bool = False,
        adds_one: bool = False,
    ) -> torch.Tensor: ...


class AddRmsNorm(Protocol):
    """See reference.add_rms_norm."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        y_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        rounds_late: bool = False,
        adds_one: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class GateMul(Protocol):
    """See reference.gate_mul."""

    def __call__(self, gate_up_TF: torch.Tensor, activation: Activation) -> torch.Tensor: ...


class Experts(Protocol):
    """See orca_kernels.experts.experts. `nbytes`: of all experts, as they are kept."""

    @property
    def nbytes(self) -> int: ...

    def __call__(
        self, x_TH: torch.Tensor, expert_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor: ...


class MakeExperts(Protocol):
    """Takes one expert's matrices after the other, and keeps what it needs of them."""

    def __call__(
        self, matrices: Iterable[Matrices], num_experts: int, activation: Activation
    ) -> Experts: ...


class EmptyKV(Protocol):
    """See reference.empty_kv. What the other two of attention's operations are given."""

    def __call__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class RotateAndWrite(Protocol):
    """See reference.rotate_and_write."""

    def __call__(
        self,
        q_TND: torch.Tensor,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
        rotation: Rotation | None,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor: ...


class PagedAttention(Protocol):
    """See reference.paged_attention."""

    def __call__(
        self,
        q_TND: torch.Tensor,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class Sample(Protocol):
    """See orca_kernels.sample.sample."""

    def __call__(self, logits_NV: torch.Tensor, table_RP: torch.Tensor) -> torch.Tensor: ...


class MakeDecodeTables(Protocol):
    """Of decodes that start there, and have so many blocks. They are a context's `tables`, once on
    the device.
    """

    def __call__(self, starts: Sequence[int], num_blocks: Sequence[int]) -> DecodeTables: ...


class DecodeTablesFor(Protocol):
    """How attention's tables for decodes are made, by the query heads of a KV head and their type.

    None: such heads need lengths on the host.
    """

    def __call__(self, *, group: int, head_dim: int, itemsize: int) -> MakeDecodeTables | None: ...


Capture = Callable[[Work], Work]  # as it is from now on, whatever these buffers hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations of a decoder layer, and sampling, as one device does them.

    `decode_tables`: of kernels that can be captured, since they find lengths on the device.
    `capture`: of those that capture themselves, since nothing of them is launched.
    `has_own_threads`: all that is large runs on them. Torch should have one thread then: its
    others would go on looking for work, for milliseconds, on cores that these need.
    """

    name: str
    has_own_threads: bool
    linear: MakeLinear
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    gate_mul: GateMul
    experts: MakeExperts
    empty_kv: EmptyKV
    rotate_and_write: RotateAndWrite
    paged_attention: PagedAttention
    sample: Sample
    decode_tables: DecodeTablesFor | None = None
    capture: Capture | None = None


class DeviceTooOld(Exception):
    """A GPU without what the kernels are made of; says which."""


class NoFlashInfer(Exception):
    """It can't be had here; says why."""


def kernels_for(device: torch.device, dtype: torch.dtype, num_threads: int) -> Kernels:
    """The fastest kernels for a device; one warning where it had to be the slow ones."""
    if device.type == "cpu" and dtype in CPU_DTYPES:
        try:
            return cpu_kernels(dtype, num_threads)
        except BuildError as error:
            log.warning("kernels run in plain torch, which is slower: %s", error)
    if device.type == "cuda":
        try:
            return triton_kernels(torch.cuda.get_device_capability(device))
        except (DeviceTooOld, ImportError) as error:
            log.warning("kernels run in plain torch, which is slower: %s", error)
    return TORCH_ON_CPU if device.type == "cpu" else TORCH


TORCH = Kernels(
    name="torch",
    has_own_threads=False,
    linear=TorchLinear,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    gate_mul=reference.gate_mul,
    experts=partial(of_stacks, TorchExperts),
    empty_kv=reference.empty_kv,
    rotate_and_write=reference.rotate_and_write,
    paged_attention=reference.paged_attention,
    sample=sample.sample,
)
TORCH_ON_CPU = replace(
    TORCH,
    experts=partial(CpuExperts, TorchLinear, reference.gate_mul),
    sample=cpu_sample.sample,
)


def cpu_kernels(dtype: torch.dtype, num_threads: int) -> Kernels:
    """Ours; but matmuls in bfloat16 are oneDNN's where the CPU has instructions for them.

    Raises BuildError.
    """
    library = load_library()
    rows = CpuRows(library, num_threads)
    multiplies_bf16 = dtype is torch.bfloat16 and _cpu_multiplies_bf16()
    linear = TorchLinear if multiplies_bf16 else partial(CpuLinear, library, num_threads)
    return Kernels(
        name="cpu",
        has_own_threads=not multiplies_bf16,
        linear=linear,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        gate_mul=rows.gate_mul,
        experts=partial(CpuExperts, linear, rows.gate_mul),
        empty_kv=empty_kv,
        rotate_and_write=rows.rotate_and_write,
        paged_attention=CpuAttention(library, num_threads),
        sample=cpu_sample.sample,
        decode_tables=decode_tables,
        capture=partial(capture, library),
    )


def triton_kernels(capability: tuple[int, int]) -> Kernels:
    """Ours in Triton; matmuls are cuBLAS's.

    Raises DeviceTooOld, and ImportError where triton is not installed.
    """
    if capability < MIN_CAPABILITY:
        raise DeviceTooOld(
            "this GPU's compute capability is {}.{}, the Triton kernels need {}.{}".format(
                *capability, *MIN_CAPABILITY
            )
        )
    from orca_kernels.triton import rows  # nothing else needs triton
    from orca_kernels.triton import sample as triton_sample
    from orca_kernels.triton.attention import TritonAttention, decode_tiles
    from orca_kernels.triton.experts import TritonExperts

    return Kernels(
        name="triton",
        has_own_threads=False,
        linear=TorchLinear,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        gate_mul=rows.gate_mul,
        experts=partial(of_stacks, TritonExperts),
        empty_kv=reference.empty_kv,
        rotate_and_write=rows.rotate_and_write,
        paged_attention=TritonAttention(),
        sample=triton_sample.sample,
        decode_tables=decode_tiles,
    )


def with_flash_infer(kernels: Kernels) -> Kernels:
    """The same, with attention by FlashInfer where that serves; raises NoFlashInfer."""
    if kernels.name != "triton":
        raise NoFlashInfer(f"it goes with the Triton kernels, and this device has {kernels.name}'s")
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except (ImportError, OSError, RuntimeError) as error:
        raise NoFlashInfer(f"flashinfer can't be imported ({error})") from error
    attention = FlashInferAttention(BatchPrefillWithPagedKVCacheWrapper, kernels.paged_attention)
    return replace(kernels, name="triton, flashinfer", paged_attention=attention)


def _cpu_multiplies_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags
