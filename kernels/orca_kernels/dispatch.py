"""Which backend serves a device: the C++ kernel on CPUs that can compile it, else the reference."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from orca_kernels import reference
from orca_kernels.context import AttentionContext
from orca_kernels.cpu.attention import DTYPES, make_cpu_attention
from orca_kernels.cpu.build import BuildError

log = logging.getLogger(__name__)


class WriteKV(Protocol):
    """See reference.write_kv."""

    def __call__(
        self,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
    ) -> None: ...


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
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """The operations a device's kernels provide."""

    name: str
    write_kv: WriteKV
    paged_attention: PagedAttention


def attention_backend(
    device: torch.device, dtype: torch.dtype, num_threads: int
) -> AttentionBackend:
    """The fastest backend for a device; one warning where it had to be the slow one."""
    if device.type == "cpu" and dtype in DTYPES:
        try:
            return _backend("cpu", make_cpu_attention(num_threads))
        except BuildError as error:
            log.warning("attention runs in plain torch, which is slower: %s", error)
    return _backend("reference", reference.paged_attention)


def _backend(name: str, paged_attention: PagedAttention) -> AttentionBackend:
    return AttentionBackend(name=name, write_kv=reference.write_kv, paged_attention=paged_attention)
