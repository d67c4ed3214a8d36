"""What a decoder layer computes, for one device: matmuls, norms, rotation, attention over paged KV.

Orca's selective batching (§3, S2) runs everything on the flat batch but attention, which
is per request and here one call for all of them.
"""

from orca_kernels.activation import Activation
from orca_kernels.context import AttentionContext, DecodeTables, Rotation
from orca_kernels.dispatch import Experts, Kernels, Linear, kernels_for
from orca_kernels.experts import route

__all__ = [
    "Activation",
    "AttentionContext",
    "DecodeTables",
    "Experts",
    "Kernels",
    "Linear",
    "Rotation",
    "kernels_for",
    "route",
]
