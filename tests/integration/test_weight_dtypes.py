"""Weights of any float type, mixed in one file too, load as their values in the run's type."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca_dist.core import Request, Sampling
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import Answer, thread_pipeline

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]

MIXTURES = {
    "fp16": (torch.float16,),
    "bf16 and fp32": (torch.bfloat16, torch.float32),
    "all three": (torch.float16, torch.bfloat16, torch.float32),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REQUEST = Request(
    id=1, prompt=(5, 9, 17, 300, 41), max_tokens=6, sampling=Sampling(return_logits=True)
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("saved"), num_layers=2)


def rounded(saved: Path, kinds: tuple[torch.dtype, ...]) -> Tensors:
    """Its tensors, each in one of `kinds`, in turn."""
    tensors = sorted(load_file(saved / WEIGHTS).items())
    return {name: tensor.to(kinds[i % len(kinds)]) for i, (name, tensor) in enumerate(tensors)}


def with_weights(saved: Path, folder: Path, tensors: Tensors) -> Path:
    shutil.copytree(saved, folder)
    save_file(tensors, folder / WEIGHTS)
    return folder


def answer(folder: Path, dtype: str) -> Answer:
    with thread_pipeline(folder, 2, dtype=dtype) as pipeline:
        return pipeline.alone(REQUEST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXTURES)
def test_the_answer_is_that_of_the_same_values_in_the_runs_type(
    saved: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    """Bit for bit, over two stages."""
    mixed = rounded(saved, MIXTURES[name])
    uniform = {key: tensor.to(DTYPES[dtype]) for key, tensor in mixed.items()}
    assert {tensor.dtype for tensor in mixed.values()} == set(MIXTURES[name])
    ours = answer(with_weights(saved, tmp_path / "mixed", mixed), dtype)
    same = answer(with_weights(saved, tmp_path / "uniform", uniform), dtype)
    assert len(ours.tokens) == 6
    assert (ours.tokens, ours.logits_bytes) == (same.tokens, same.logits_bytes)


def test_fp16_gives_the_logits_of_transformers(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = with_weights(saved, tmp_path / "fp16", rounded(saved, (torch.float16,)))
    ours = answer(folder, "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([[*REQUEST.prompt, *ours.tokens[:-1]]])).logits[0]
    torch.testing.assert_close(
        torch.from_numpy(ours.logits(320).copy()), theirs, atol=2e-3, rtol=1e-4
    )
