"""The examples run as they stand, against a live server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fixtures.checkpoints import letter, script_llama
from tests.fixtures.live import local_config
from tests.fixtures.served import served

ROOT = Path(__file__).resolve().parents[2]


def test_reflection(tmp_path: Path) -> None:
    following = {letter(c): letter(d) for c, d in zip("ABCDE", "BCDEF", strict=True)}
    folder = script_llama(tmp_path / "script", lambda token: following.get(token, 2))
    with served(folder, local_config(1)) as server:
        run = subprocess.run(
            [sys.executable, "examples/reflection.py", server.address, "A"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    services, answer = run.stdout.splitlines()
    assert "orca.v1.GenerateService" in services
    assert "grpc.health.v1.Health" in services
    assert answer == "BCDEF"
