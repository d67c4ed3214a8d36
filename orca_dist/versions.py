"""What runs here, in versions: every process of a pipeline has to say the same."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

from orca_dist import __version__


def installed_versions() -> Mapping[str, str]:
    """By name; imports none of them. Empty: not installed."""
    return {
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "ray": _installed("ray"),
        "orca_dist": __version__,
    }


def essential(name: str, version: str) -> str:
    """What all processes need alike: of Python not its last number, of torch not CPU or CUDA."""
    if name == "python":
        return version.rpartition(".")[0]
    return version.partition("+")[0]


def software_versions() -> str:
    """The essential part of them all, in one line."""
    return ", ".join(
        f"{name} {essential(name, version) or 'none'}"
        for name, version in installed_versions().items()
    )


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
