"""Files of fp16, of bf16 and of all float types mixed, of every family, against transformers.

Run in fp32, where each stored value is exact: logits are transformers' to 1e-4. What a run in
bf16 makes of such files is in tests/unit/stage/test_weight_dtypes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from orca_dist.core import Request, Sampling
from orca_dist.spec import FAMILIES
from tests.fixtures.checkpoints import LOUD_VOCAB_SIZE, loud_model
from tests.fixtures.families import VARIANTS
from tests.fixtures.golden_measure import TOLERANCE
from tests.fixtures.thread_pipeline import thread_pipeline

WEIGHTS = "model.safetensors"
REQUEST = Request(
    id=1, prompt=tuple(range(40, 77)), max_tokens=6, sampling=Sampling(return_logits=True)
)
# Of each family, the variant that has the most kinds of tensors.
RICHEST: Mapping[str, str] = {
    "llama": "llama, all biases",
    "mistral": "mistral, window",
    "qwen2": "qwen2, upper windows",
    "qwen3": "qwen3, biases and windows",
    "smollm3": "smollm3, listed layers and windows",
    "granite": "granite",
    "olmo2": "olmo2, biases and stretched",
    "gemma2": "gemma2, no caps, biases and listed windows",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe, dense layers, biases and window",
}
MIXTURES: Mapping[str, tuple[torch.dtype, ...]] = {
    "fp16": (torch.float16,),
    "bf16": (torch.bfloat16,),
    "mixed": (torch.float16, torch.bfloat16, torch.float32),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = VARIANTS[RICHEST[request.param]]
    assert config["model_type"] == request.param
    return loud_model(tmp_path_factory.mktemp("saved"), config)


@pytest.mark.parametrize("mixture", list(MIXTURES))
def test_logits(saved: Path, tmp_path: Path, mixture: str) -> None:
    """A head and its embedding, a bias and its matrix, a norm of heads: each in another type."""
    folder = _stored_as(saved, tmp_path, MIXTURES[mixture])
    with thread_pipeline(folder, 2) as pipeline:
        answer = pipeline.alone(REQUEST)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([[*REQUEST.prompt, *answer.tokens[:-1]]])).logits[0].numpy()
    np.testing.assert_allclose(answer.logits(LOUD_VOCAB_SIZE), expected, atol=TOLERANCE, rtol=0)


def _stored_as(saved: Path, folder: Path, kinds: tuple[torch.dtype, ...]) -> Path:
    """A copy whose tensors are in one of `kinds`, in turn."""
    for path in saved.iterdir():
        if path.name != WEIGHTS:
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = sorted(load_file(saved / WEIGHTS).items())
    stored = {name: tensor.to(kinds[i % len(kinds)]) for i, (name, tensor) in enumerate(tensors)}
    assert {tensor.dtype for tensor in stored.values()} == set(kinds)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
