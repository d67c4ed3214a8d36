"""What of mixtures of experts a comparison of logits or likeliest tokens could miss.

Routes and blocks in bfloat16 by transformers' own modules; that each key of config.json counts;
what happens where a file lacks an expert.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from orca_kernels import Kernels, kernels_for, route
from orca_kernels.dispatch import TORCH
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from orca_dist.errors import ModelError
from orca_dist.models.mlp import make_mlp
from orca_dist.spec import ModelSpec, load_spec, parse_spec
from orca_dist.weights import check_folder, describe
from tests.fixtures.checkpoints import TINY_SIZES, loud_model
from tests.fixtures.families import VARIANTS
from tests.fixtures.golden_measure import TOLERANCE
from tests.golden.test_gemma2 import changed, ours, theirs

CPU = torch.device("cpu")
KERNELS = [TORCH, kernels_for(CPU, torch.bfloat16, 1)]
BLOCKS = {"mixtral": MixtralSparseMoeBlock, "qwen3_moe": Qwen3MoeSparseMoeBlock}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_model(tmp_path_factory.mktemp("experts"), VARIANTS["qwen3_moe"])


@torch.inference_mode()
def block_of(name: str, dtype: torch.dtype, **changes: Any) -> tuple[ModelSpec, PreTrainedModel]:
    """One layer's, with weights as after a training."""
    config = AutoConfig.for_model(**{**TINY_SIZES, **VARIANTS[name], **changes})
    block = BLOCKS[config.model_type](config)
    generator = torch.Generator().manual_seed(0)
    for weights in block.parameters():
        weights.normal_(0, weights.shape[-1] ** -0.5, generator=generator)
    return parse_spec(config.to_dict()), block.to(dtype)


def weights_of(block: Any) -> dict[str, torch.Tensor]:
    """By our names, of layer 0."""
    found = {"layers.0.router": block.gate.weight.detach()}
    pairs = zip(block.experts.gate_up_proj.detach(), block.experts.down_proj.detach(), strict=True)
    for number, (gate_up_FH, down_HF) in enumerate(pairs):
        prefix = f"layers.0.experts.{number}."
        found[prefix + "gate"], found[prefix + "up"] = gate_up_FH.chunk(2)
        found[prefix + "down"] = down_HF
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_routes_have_the_bits_of_transformers(
    name: str, normalised: bool, dtype: torch.dtype
) -> None:
    """Mixtral always normalises; Qwen3 rounds."""
    spec, block = block_of(name, dtype, norm_topk_prob=normalised)
    x_TH = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    scores_TE, wanted_TK, chosen_TK = block.gate(x_TH)
    experts = spec.experts
    assert experts is not None
    assert experts.normalised is (normalised or name == "mixtral")
    expert_TK, weight_TK = route(
        scores_TE,
        experts.num_chosen,
        normalised=experts.normalised,
        rounded=experts.rounds_shares,
    )
    assert torch.equal(expert_TK, chosen_TK)
    assert torch.equal(weight_TK, wanted_TK.float())


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("name", ["mixtral", "mixtral, one of four and a window", "qwen3_moe"])
@torch.inference_mode()
def test_a_block_in_bfloat16_is_that_of_transformers(kernels: Kernels, name: str) -> None:
    """Where the same experts are chosen: a score that rounds the other way may choose another."""
    spec, block = block_of(name, torch.bfloat16)
    x_TH = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted_TH = block(x_TH[None])[0].float()
    got_TH = make_mlp(spec, weights_of(block), 0, kernels)(x_TH).float()
    error_T = (got_TH - wanted_TH).norm(dim=-1) / wanted_TH.norm(dim=-1)
    assert (error_T < 0.02).float().mean() > 0.95


KEYS: dict[str, dict[str, Any]] = {
    "normalised": {"norm_topk_prob": False},
    "fewer": {"num_experts_per_tok": 2},
    "a window": {"use_sliding_window": True, "sliding_window": 5},
}


@pytest.mark.parametrize("what", KEYS)
def test_each_key_counts(folder: Path, tmp_path: Path, what: str) -> None:
    other = changed(folder, tmp_path / "other", **KEYS[what])
    logits = ours(other)
    assert np.abs(logits - ours(folder)).max() > 1000 * TOLERANCE
    np.testing.assert_allclose(logits, theirs(other), atol=TOLERANCE, rtol=0)


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "other")
    lacking = "model.layers.4.mlp.experts.11.up_proj.weight"
    tensors = load_file(other / WEIGHTS)
    check_folder(other, load_spec(other))
    del tensors[lacking]
    save_file(tensors, other / WEIGHTS)
    with pytest.raises(ModelError, match=f"{lacking} is missing from the checkpoint"):
        check_folder(other, load_spec(other))


def test_show_tells_of_experts(folder: Path) -> None:
    assert describe(folder)["experts"] == {
        "num_experts": 12,
        "num_chosen": 3,
        "intermediate_size": 40,
        "normalised": True,
        "rounds_shares": True,
        "layers": (0, 1, 2, 3, 4),
    }
