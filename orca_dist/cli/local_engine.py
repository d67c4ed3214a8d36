"""The engine's knobs with the defaults of a bench that brings stages of its own kind."""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.config import EngineConfig, Launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine(EngineConfig):
    """Three processes of this machine, unless told otherwise."""

    stages: int = 3
    """Pipeline stages: each holds a contiguous block of layers on its own device."""
    launcher: Launcher = Launcher.LOCAL
    """Start stages as Ray actors, or as processes of this machine."""
