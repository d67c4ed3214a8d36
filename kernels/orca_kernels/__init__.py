"""Attention over paged KV for a mixed batch: one interface, one backend a device.

Orca's selective batching (§3, S2) runs everything else on the flat batch and only
attention per request; these kernels are that one part.
"""

from orca_kernels.context import AttentionContext
from orca_kernels.dispatch import AttentionBackend, attention_backend

__all__ = ["AttentionBackend", "AttentionContext", "attention_backend"]
