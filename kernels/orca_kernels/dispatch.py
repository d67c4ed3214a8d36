"""Which backend serves a device. Today the torch reference serves them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from orca_kernels import reference
from orca_kernels.context import AttentionContext


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
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """The operations a device's kernels provide."""

    name: str
    write_kv: WriteKV
    paged_attention: PagedAttention


def attention_backend(device: torch.device) -> AttentionBackend:
    """The backend for a device."""
    return AttentionBackend(
        name="reference",
        write_kv=reference.write_kv,
        paged_attention=reference.paged_attention,
    )
