"""orca_dist: a pipeline-parallel runtime for serving language models, after the Orca paper.

The names below load on first use, so that `import orca_dist.core` stays pure.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orca_dist.client import AsyncClient, Client, Tls
    from orca_dist.config import EngineConfig
    from orca_dist.errors import OrcaError
    from orca_dist.llm import LLM, Completion
    from orca_dist.params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "Completion",
    "EngineConfig",
    "OrcaError",
    "SamplingParams",
    "Tls",
]

_HOMES = {
    "LLM": "orca_dist.llm",
    "Completion": "orca_dist.llm",
    "SamplingParams": "orca_dist.params",
    "EngineConfig": "orca_dist.config",
    "OrcaError": "orca_dist.errors",
    "Client": "orca_dist.client",
    "AsyncClient": "orca_dist.client",
    "Tls": "orca_dist.client",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'orca_dist' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
