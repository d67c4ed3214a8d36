"""The command as a process: how it is called, what it imports, and a reader that leaves early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orca_dist import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orca_dist", "--version"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == f"orca-dist {__version__}\n"


def test_the_command_line_is_read_before_grpc_and_the_engine_are_imported() -> None:
    code = (
        "import sys; from orca_dist.cli.main import main; main(['serve', '--help']); "
        "sys.exit(bool({'grpc', 'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("line", ["serve --help", "cluster init --help", "--version"])
def test_a_reader_that_leaves_early_is_not_told_off(line: str) -> None:
    read, write = os.pipe()
    os.close(read)  # as of a `head` that has enough
    done = subprocess.run(
        [sys.executable, "-m", "orca_dist", *line.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
