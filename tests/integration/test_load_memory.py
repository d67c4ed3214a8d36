"""Loading a stage needs room for its weights once: what was packed is not kept beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from orca_dist.spec import parse_spec
from orca_dist.weights.names import LM_HEAD, model_tensors, tensor_shapes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
EXPERTS = {
    "model_type": "mixtral",
    "num_local_experts": 16,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
}
LOAD = """
import sys
from pathlib import Path
from orca_dist.core import split_layers
from orca_dist.stage.worker import StageWorker
from tests.fixtures.thread_pipeline import stage_setup

def kilobytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

worker = StageWorker(host="127.0.0.1")
setup = stage_setup(Path(sys.argv[1]), 0, split_layers(int(sys.argv[2]), 1), "float32")
before = kilobytes("VmRSS")
loaded = worker.load(setup)
print((kilobytes("VmHWM") - before) * 1024 / loaded.weight_bytes)
"""


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, id="mlp"), pytest.param(EXPERTS, id="experts", marks=pytest.mark.slow)],
)
def test_the_peak_is_not_twice_the_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {**CONFIG, **changes}
    spec = parse_spec(config)
    shapes = tensor_shapes(spec, model_tensors(spec, {LM_HEAD}))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: torch.full(shape, 1 / 3) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(spec.num_layers)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.9 < float(run.stdout) < 1.6
