"""`orca-dist bench roofline` on a GPU: what docs/gpu.md's figures are made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orca_dist.cli.main import main
from tests.fixtures.checkpoints import loud_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_matmuls_are_timed_on_the_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = loud_llama(tmp_path / "model")
    flags = "--launcher local --stages 1 --device cuda --requests 4 --rounds 1 --json"
    assert main(["bench", "roofline", str(folder), *flags.split()]) == 0
    (stage,) = json.loads(capfd.readouterr().out)["stages"]
    assert 0 < stage["matmul_s"] < stage["computing_s"]
    assert stage["read_gb_s"] > 100  # no CPU's memory does
