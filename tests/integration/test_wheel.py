"""What is installed from a wheel has the files of `orca-dist cluster init`, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orca_dist.cli.templates import kinds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("orca_dist", "kernels", "cluster", "launch")
FILES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel holds, made from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *flags, str(source)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize("kind", kinds())
def test_cluster_init_from_a_wheel(site: Path, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "orca_dist", "cluster", "init", kind, "made"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    expected, made = ROOT / "cluster" / kind, tmp_path / "made"
    assert _contents(made) == _contents(expected)


def _contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
