"""The C++ kernels under the address and undefined-behaviour sanitizers, through their own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL_TESTS = ("test_cpu_attention.py", "test_kernels.py", "test_rotary.py")
UNIT = Path(__file__).parents[1] / "unit"
BUILD_TESTS = "built_once or compiler or dispatch"  # they choose a compiler of their own


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernels_are_clean(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    flags = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {flags}\n')
    compiler.chmod(0o755)
    done = run_tests(tmp_path, compiler, [str(UNIT / name) for name in KERNEL_TESTS])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert list((tmp_path / "orca-dist/kernels").iterdir()), "the sanitized kernels were used"


@pytest.mark.slow
def test_the_sanitizer_sees_a_read_beyond_the_end(tmp_path: Path) -> None:
    """So that the test above can fail."""
    source, program = tmp_path / "a.cpp", tmp_path / "a.out"
    source.write_text("int main(int n, char**) { int* p = new int[4]; return p[n + 4]; }")
    command = ["g++", "-fsanitize=address", "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=60)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert "heap-buffer-overflow" in done.stderr


def run_tests(cache: Path, compiler: Path, paths: list[str]) -> subprocess.CompletedProcess[str]:
    assert shutil.which("g++"), "g++ has the sanitizers' libraries"
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "CXX": str(compiler),
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--timeout=0",
        "-k",
        f"not ({BUILD_TESTS})",
        *paths,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=590, env=environment)
