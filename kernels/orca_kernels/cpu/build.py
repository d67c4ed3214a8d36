"""Compiles the kernels beside this file with this machine's own compiler, once.

The result lies in the user's cache folder under a name that stands for the
sources, the flags, the compiler and the CPU; it appears whole, by a rename.
Knows nothing of what the kernels do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import platformdirs
from filelock import FileLock

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 600.0  # of a compiler that hangs; a busy machine may need minutes
LOCK = ".lock"


class BuildError(Exception):
    """No compiler, or one that can't build the kernel; says which."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels; raises BuildError."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise BuildError(f"none of {', '.join(COMPILERS)} is installed")
    target = _cache_dir() / f"cpu-{_fingerprint(compiler)}.so"
    if not target.exists():
        _compile(compiler, target)
    return ctypes.CDLL(str(target))


def _cache_dir() -> Path:
    return Path(platformdirs.user_cache_dir("orca-dist", appauthor=False)) / "kernels"


def _fingerprint(compiler: str) -> str:
    version = _run([compiler, "--version"])
    sources = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.[ch]*"))]
    parts = (*sources, *FLAGS, compiler, version, _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _cpu() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, target: Path) -> None:
    """One process at a time: the others find it done."""
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK), tempfile.TemporaryDirectory(dir=folder) as made_in:
            if not target.exists():
                _link(compiler, Path(made_in) / target.name).replace(target)
    except (OSError, NotImplementedError) as error:  # the latter: no locks in that file system
        raise BuildError(f"{folder} can't be written: {error}") from None


def _link(compiler: str, made: Path) -> Path:
    """A library of all sources, which are compiled side by side."""
    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(partial(_object, compiler, made.parent), FOLDER.glob("*.cpp")))
    _run([compiler, "-shared", "-pthread", "-o", str(made), *sorted(objects)])
    return made


def _object(compiler: str, folder: Path, source: Path) -> str:
    made = str(folder / f"{source.stem}.o")
    _run([compiler, *FLAGS, "-c", "-o", made, str(source)])
    return made


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(f"{command[0]} failed: {last}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} can't be run: {error}") from None
    return done.stdout
