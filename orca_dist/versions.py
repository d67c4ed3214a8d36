"""What runs here, in versions: every process of a pipeline has to say the same."""

from __future__ import annotations

import importlib.metadata
import platform

from orca_dist import __version__


def software_versions() -> str:
    """Python, torch, ray and orca_dist; imports none of them.

    What may differ between processes is left out: Python's last number, and whether torch was
    built for CPUs or for CUDA.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return (
        f"python {python}, torch {_installed('torch')}, "
        f"ray {_installed('ray')}, orca_dist {__version__}"
    )


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "none"
