"""The core and the client stay light: what they import, and what they work without."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import orca_dist.core

CORE = Path(orca_dist.core.__file__).parent
FILES = sorted(CORE.rglob("*.py"))

# Of the standard library, what would bring a clock, chance, files or threads into the core.
IMPURE_TIME = {"datetime", "time", "random", "secrets", "uuid"}
IMPURE_FILES = {"io", "logging", "os", "pathlib", "shutil", "socket", "tempfile"}
IMPURE_TASKS = {"asyncio", "concurrent", "multiprocessing", "signal", "subprocess", "threading"}
IMPURE = IMPURE_TIME | IMPURE_FILES | IMPURE_TASKS

BLOCKER = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"blocked: {{name}}")
sys.meta_path.insert(0, Blocker())
"""


def imports_of(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield node.module or ""


def run_blocked(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh interpreter in which the `blocked` packages can't be imported."""
    script = BLOCKER.format(blocked=set(blocked)) + code
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_files_are_found() -> None:
    assert {"scheduler.py", "pool.py", "kv.py", "plan.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_core_imports_the_standard_library_and_itself(path: Path) -> None:
    for name in imports_of(path):
        top = name.partition(".")[0]
        assert name.startswith("orca_dist.core") or top in sys.stdlib_module_names, name
        assert top not in IMPURE, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_core_opens_no_file_and_prints_nothing(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls.isdisjoint({"open", "print", "input", "exec", "eval", "__import__"})


def test_the_blocker_blocks() -> None:
    done = run_blocked("import grpc", "grpc")
    assert done.returncode != 0
    assert "blocked: grpc" in done.stderr


def test_core_works_without_the_heavy_packages() -> None:
    done = run_blocked("import orca_dist.core", "torch", "ray", "grpc", "numpy", "google")
    assert done.returncode == 0, done.stderr


def test_client_works_without_torch_and_ray() -> None:
    code = "import orca_dist.core, orca_dist.client; print(orca_dist.client.Client.__name__)"
    done = run_blocked(code, "torch", "ray")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Client\n"
