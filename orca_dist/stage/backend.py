"""Whose attention a stage runs, by the word that a person gave."""

from __future__ import annotations

from orca_kernels import Kernels
from orca_kernels.dispatch import NoFlashInfer, with_flash_infer

from orca_dist.config import AttentionBackend
from orca_dist.errors import ConfigError


def with_attention(kernels: Kernels, backend: str) -> Kernels:
    """A device's kernels with the attention that was asked for; raises ConfigError."""
    if backend != AttentionBackend.FLASHINFER:
        return kernels
    try:
        return with_flash_infer(kernels)
    except NoFlashInfer as error:
        raise ConfigError(
            f"attention_backend = {backend}: {error}; leave it out, or install "
            "orca-dist[flashinfer] on every node"
        ) from None
