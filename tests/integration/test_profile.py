"""`orca-dist profile` on real stages: the simulator reads what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orca_dist.bench.profile import PASSES, run_profile
from orca_dist.cli.main import main
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.sim.table import read_cost_table
from tests.fixtures.checkpoints import loud_llama


def test_one_pass_makes_a_table(tmp_path: Path) -> None:
    config = EngineConfig(stages=2, launcher="local", device="cpu", dtype="float32", kv_tokens=8192)
    folder, path = loud_llama(tmp_path / "model"), tmp_path / "cost.json"
    profile = run_profile(folder, config, LogConfig(), seed=0, passes=PASSES[:1])
    path.write_text(json.dumps(profile.table))
    table = read_cost_table(path)
    assert (table.num_stages, table.kv_tokens) == (2, 8192)
    assert table.latency.plan_s > 0
    assert table.latency.token_s > 0
    assert sum(profile.split.sizes) == 5
    assert 0 <= profile.split.idle_share < 1


@pytest.mark.slow
def test_the_command_writes_what_simulate_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, path = loud_llama(tmp_path / "model"), tmp_path / "cost.json"
    local = "--stages 2 --launcher local --device cpu --dtype float32 --kv-tokens 8192"
    assert main(["profile", str(folder), "-o", str(path), *local.split()]) == 0
    printed = capfd.readouterr()
    assert printed.out == f"{path}\n"
    assert re.search(r"with --split \d \d it would be \d+\.\d%$", printed.err.strip())
    command = f"simulate --stages 2 --cost {path} --num-requests 20 --prompt-len 8 --json"
    assert main(command.split()) == 0
    assert json.loads(capfd.readouterr().out)["throughput_req_s"] > 0
