"""What of Gemma 2 a comparison of logits or likeliest tokens could miss.

That each cap and the embedding's multiplier count is shown by leaving it out; what bfloat16 rounds
where, by the bits of transformers' own modules.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from orca_kernels import Activation, Kernels, kernels_for
from orca_kernels.dispatch import TORCH
from transformers import AutoModelForCausalLM, Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm

from orca_dist.core import Request, Sampling
from orca_dist.models.decoder import Decoder
from orca_dist.models.layers import cap_logits
from orca_dist.spec import load_spec
from orca_dist.weights import model_tensors
from orca_dist.weights.checkpoint import Checkpoint
from tests.fixtures.checkpoints import LOUD_VOCAB_SIZE, loud_model
from tests.fixtures.families import VARIANTS
from tests.fixtures.thread_pipeline import thread_pipeline

LOOSE = 1e-3  # scores that aren't capped spread by 16 here, so that rounding shows more
CPU = torch.device("cpu")
REQUEST = Request(
    id=1, prompt=tuple(range(40, 77)), max_tokens=1, sampling=Sampling(return_logits=True)
)
KERNELS = [TORCH, kernels_for(CPU, torch.bfloat16, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_model(tmp_path_factory.mktemp("gemma2"), VARIANTS["gemma2"])


def changed(folder: Path, made: Path, **keys: Any) -> Path:
    """The same weights under another config.json."""
    shutil.copytree(folder, made)
    path = made / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **keys}), encoding="utf-8")
    return made


def ours(folder: Path) -> np.ndarray:
    with thread_pipeline(folder, 2) as pipeline:
        return pipeline.alone(REQUEST).logits(LOUD_VOCAB_SIZE)


def theirs(folder: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([REQUEST.prompt])).logits[0].numpy()
    return logits


LEFT_OUT: dict[str, dict[str, Any]] = {
    "the cap of scores": {"attn_logit_softcapping": None},
    "the cap of logits": {"final_logit_softcapping": None},
    "its own scale": {"query_pre_attn_scalar": 16},
    "the windows": {"layer_types": ["full_attention"] * 5},
    "GELU": {"hidden_activation": "silu"},
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_each_counts_and_is_right_left_out_too(folder: Path, tmp_path: Path, what: str) -> None:
    without = changed(folder, tmp_path / "without", **LEFT_OUT[what])
    logits = ours(without)
    assert np.abs(logits - ours(folder)).max() > 100 * LOOSE
    np.testing.assert_allclose(logits, theirs(without), atol=LOOSE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_have_the_bits_of_transformers(folder: Path, dtype: torch.dtype) -> None:
    """The root of 72 is 8.485, and 8.5 in bfloat16."""
    ids_T = torch.arange(LOUD_VOCAB_SIZE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    spec, checkpoint = load_spec(folder), Checkpoint(folder)
    names = model_tensors(spec, checkpoint.names())
    weights = {
        name: checkpoint.tensor(hf, dtype=dtype, device=CPU)
        for name, hf in names.items()
        if not name.startswith("layers.")
    }
    decoder = Decoder(
        spec=spec, layers=range(0), weights=weights, kernels=TORCH, device=CPU, dtype=dtype
    )
    assert torch.equal(decoder.embed(ids_T), model.model.embed_tokens(ids_T).detach())


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_norms_have_the_bits_of_transformers(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = Gemma2RMSNorm(576, eps=1e-6)
    norm.weight.copy_(torch.randn(576, generator=generator) * 0.1)
    norm = norm.to(dtype)
    x_TH = torch.randn(50, 576, generator=generator).mul(3).to(dtype)
    got = kernels.rms_norm(x_TH, norm.weight, 1e-6, rounds_late=True, adds_one=True)
    assert torch.equal(got, norm(x_TH))


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@torch.inference_mode()
def test_the_gate_is_that_of_transformers(kernels: Kernels) -> None:
    """To the bit, but for a rounding that goes the other way now and then.

    Where the gate is all but shut, torch's 1 + tanh has few digits left, and so they differ.
    """
    mlp = Gemma2MLP(Gemma2Config(hidden_size=8, intermediate_size=8)).to(torch.bfloat16)
    gate_up_TF = torch.randn(200, 512, generator=torch.Generator().manual_seed(0)).mul(3)
    gate_up_TF = gate_up_TF.bfloat16()
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    wanted = mlp.act_fn(gate_TF) * up_TF
    got = kernels.gate_mul(gate_up_TF, Activation.GELU_TANH)
    assert (got == wanted)[gate_TF > -2].float().mean() > 0.99
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_logits", [7, 320, 40_001])
def test_a_row_of_capped_logits_has_the_same_bits_in_any_batch(
    num_threads: int, num_logits: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    logits_RV = torch.randn(9, num_logits, generator=torch.Generator().manual_seed(0)) * 20
    try:
        together = cap_logits(logits_RV.clone(), 30.0)
        alone = [cap_logits(row.clone(), 30.0) for row in logits_RV.split(1)]
        later = cap_logits(logits_RV[2:].clone(), 30.0)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[2:], later)
    wanted = 30.0 * torch.tanh(logits_RV.double() / 30.0)
    torch.testing.assert_close(together.double(), wanted, atol=1e-5, rtol=0)
