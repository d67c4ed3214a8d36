"""Programs that forget to close their engine still end, and leave no stage behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.fixtures.checkpoints import loud_llama

PROGRAM = """
import sys
from pathlib import Path
from orca_dist.engine.engine import Engine
from tests.fixtures.live import local_config
engine = Engine.start(Path(sys.argv[1]), local_config(2))
print(*(stage.pid for stage in engine.info().stages), flush=True)
"""
ROOT = Path(__file__).resolve().parents[2]


def test_a_program_without_close_ends(tmp_path: Path) -> None:
    folder = loud_llama(tmp_path / "loud")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    pids = [int(word) for word in run.stdout.split()]
    assert len(pids) == 2
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=15)[1]
