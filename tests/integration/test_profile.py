"""`orca-dist profile` on real stages: the simulator reads what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orca_dist.cli.main import main
from orca_dist.sim.table import read_cost_table
from tests.fixtures.checkpoints import loud_llama


def test_the_command_writes_what_simulate_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, path = loud_llama(tmp_path / "model"), tmp_path / "cost.json"
    local = "--stages 2 --launcher local --device cpu --dtype float32 --kv-tokens 8192"
    assert main(["profile", str(folder), "-o", str(path), *local.split()]) == 0
    assert capfd.readouterr().out == f"{path}\n"
    assert read_cost_table(path).num_stages == 2
    command = f"simulate --stages 2 --cost {path} --num-requests 20 --prompt-len 8 --json"
    assert main(command.split()) == 0
    assert json.loads(capfd.readouterr().out)["throughput_req_s"] > 0
