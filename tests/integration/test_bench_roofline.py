"""bench roofline on a real pipeline: what it says of each stage adds up."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from orca_dist.cli.main import main
from tests.fixtures.checkpoints import loud_llama


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_small_run_adds_up(dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = loud_llama(tmp_path / "model")
    workload = tmp_path / "workload.json"
    requests = [{"id": n, "prompt": 10 + n, "out": 3 + n} for n in range(4)]
    workload.write_text(json.dumps({"requests": requests}))
    engine = f"--stages 2 --split 2 3 --launcher local --device cpu --dtype {dtype}"
    flags = f"--workload {workload} --rounds 2 --kv-tokens 512 --cpus-per-stage 1 --json"
    assert main(["bench", "roofline", str(folder), *flags.split(), *engine.split()]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["schema"], document["dtype"], document["threads_per_stage"]) == (1, dtype, 1)
    assert document["timed_rows"] == document["distinct_rows"] > 1
    first, last = document["stages"]
    for stage in (first, last):
        phases = ("computing_s", "receiving_s", "sending_s", "waiting_s")
        assert sum(stage[name] for name in phases) == pytest.approx(document["wall_s"])
        compute_s = stage["matmul_s"] + stage["other_compute_s"]
        assert compute_s == pytest.approx(stage["computing_s"])
        assert all(stage[name] >= 0 for name in ("receiving_s", "sending_s"))
        assert stage["matmul_s"] > 0 < stage["weight_read_s"]
    assert document["matmul_s"] == pytest.approx(first["matmul_s"] + last["matmul_s"])
    most_s = document["stages"][document["busiest_stage"]]["matmul_s"]
    assert document["share"] == pytest.approx(most_s / document["wall_s"])
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert first["weight_bytes"] == 2 * layer * 2  # bfloat16 holds the weights of both
    assert last["weight_bytes"] == (3 * layer + 320 * 64) * 2
    assert not psutil.Process().children()
