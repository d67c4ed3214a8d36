"""Tied and untied heads, biases and splits over stages: logits against transformers, fp32.

Stages run as threads of this process, so that many layouts cost little; what a
stage loads and computes is what it would as a process.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from orca_dist.core import Request, Sampling, split_layers
from orca_dist.errors import ModelError
from orca_dist.stage.worker import StageWorker
from tests.fixtures.checkpoints import LOUD_VOCAB_SIZE, loud_llama
from tests.fixtures.golden_measure import TOLERANCE
from tests.fixtures.thread_pipeline import load_stages, stage_setup, thread_pipeline
from tests.golden.test_loud_llama import transformers_logits

PROMPT = tuple(range(30, 47))
NUM_TOKENS = 8
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _check(folder: Path, num_stages: int, sizes: list[int] | None = None) -> None:
    request = Request(
        id=1, prompt=PROMPT, max_tokens=NUM_TOKENS, sampling=Sampling(return_logits=True)
    )
    with thread_pipeline(folder, num_stages, sizes=sizes) as pipeline:
        answer = pipeline.alone(request)
    expected = transformers_logits(folder, [*PROMPT, *answer.tokens[:-1]])
    np.testing.assert_allclose(answer.logits(LOUD_VOCAB_SIZE), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_tied(tmp_path: Path, num_stages: int) -> None:
    """L1 (a): the file has no head; the last stage reads the embedding as its own."""
    folder = loud_llama(tmp_path / "m", tie=True)
    assert HEAD not in load_file(folder / "model.safetensors")
    _check(folder, num_stages)


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("same", [True, False])
def test_tied_with_a_head_in_the_file(tmp_path: Path, num_stages: int, same: bool) -> None:
    """L1 (b, c): the file's head counts, as it does for the installed transformers."""
    folder = loud_llama(tmp_path / "m", tie=True)
    embed = load_file(folder / "model.safetensors")[EMBED]
    head = embed.clone() if same else torch.randn(embed.shape) * 0.25
    _rewrite(folder, {HEAD: head})
    _check(folder, num_stages)


def test_untied_without_a_head(tmp_path: Path) -> None:
    """L1 (d): refused by name, where transformers would make a random one."""
    folder = loud_llama(tmp_path / "m", tie=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load_stages(folder, 2)


@pytest.mark.parametrize("sizes", [[5], [3, 2], [1, 3, 1], [2, 1, 1, 1], [1, 1, 1, 1, 1]])
def test_splits(tmp_path: Path, sizes: list[int]) -> None:
    """L2: any split into contiguous layers computes the same model."""
    _check(loud_llama(tmp_path / "m"), len(sizes), sizes)


def test_biases(tmp_path: Path) -> None:
    _check(loud_llama(tmp_path / "m", attention_bias=True, mlp_bias=True), 2)


def test_each_stage_reads_its_own_tensors(tmp_path: Path) -> None:
    """An untied model's bytes are shared out: none twice, none left."""
    folder = loud_llama(tmp_path / "m")
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    layers = split_layers(5, 3)
    loaded = [
        StageWorker(host="127.0.0.1").load(stage_setup(folder, stage, layers, "float32"))
        for stage in range(3)
    ]
    assert sum(stage.weight_bytes for stage in loaded) == total


def _rewrite(folder: Path, extra: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
