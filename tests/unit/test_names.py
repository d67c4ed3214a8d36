"""Names: our table against transformers' own modules; what each stage holds."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from orca_dist.errors import ModelError
from orca_dist.spec import parse_spec
from orca_dist.weights import model_tensors, stage_tensors, tensor_shapes
from orca_dist.weights.names import EMBED, FINAL_NORM, LM_HEAD, gguf_tensors

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
SPEC = parse_spec(CONFIG)
UNTIED = frozenset({LM_HEAD})


@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("mlp_bias", [False, True])
def test_names_and_shapes_are_those_of_transformers(attention_bias: bool, mlp_bias: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    biases = {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    spec = parse_spec({**CONFIG, **biases})
    theirs = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **biases})).state_dict()
    ours = tensor_shapes(spec, model_tensors(spec, UNTIED))
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.items()}


@pytest.mark.parametrize("bounds", [[0, 5], [0, 3, 5], [0, 2, 4, 5], [0, 1, 2, 3, 4, 5]])
def test_stages_share_out_the_model(bounds: list[int]) -> None:
    stages = [stage_tensors(SPEC, range(*pair), UNTIED) for pair in pairwise(bounds)]
    merged = [item for stage in stages for item in stage.items()]
    assert len(merged) == len(dict(merged))
    assert dict(merged) == model_tensors(SPEC, UNTIED)


def test_ends_hold_the_ends() -> None:
    first, middle, last = (
        stage_tensors(SPEC, range(*pair), UNTIED) for pair in [(0, 2), (2, 3), (3, 5)]
    )
    assert first["embed"] == EMBED
    assert "final_norm" not in first
    assert set(middle) == {name for name in middle if name.startswith("layers.2.")}
    assert (last["final_norm"], last["lm_head"]) == (FINAL_NORM, LM_HEAD)
    assert "embed" not in last
    assert last["layers.4.q"] == "model.layers.4.self_attn.q_proj.weight"


def test_a_stage_holds_all_experts_of_its_layers() -> None:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "model_type": "mixtral"}
    held = stage_tensors(parse_spec({**CONFIG, **experts}), range(2, 3), UNTIED)
    block = "model.layers.2.block_sparse_moe"
    assert {name: hf for name, hf in held.items() if "_norm" not in name} == {
        **{f"layers.2.{name}": f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkvo"},
        "layers.2.router": f"{block}.gate.weight",
        **{
            f"layers.2.experts.{number}.{name}": f"{block}.experts.{number}.{module}.weight"
            for number in range(3)
            for name, module in {"gate": "w1", "up": "w3", "down": "w2"}.items()
        },
    }


def test_a_tied_head_is_the_embedding_unless_the_file_has_one() -> None:
    tied = dataclasses.replace(SPEC, tie_word_embeddings=True)
    last = range(3, 5)
    assert stage_tensors(tied, last, {EMBED})["lm_head"] == EMBED
    assert stage_tensors(tied, last, {EMBED, LM_HEAD})["lm_head"] == LM_HEAD


def test_an_untied_model_without_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        stage_tensors(SPEC, range(3, 5), {EMBED})
    assert "lm_head" not in stage_tensors(SPEC, range(3), {EMBED})


def test_gguf_names_reach_every_tensor() -> None:
    biased = parse_spec({**CONFIG, "attention_bias": True, "mlp_bias": True})
    reached = set(gguf_tensors(biased.num_layers).values())
    assert set(model_tensors(biased, UNTIED).values()) <= reached
    assert gguf_tensors(5)["blk.4.ffn_norm.weight"] == (
        "model.layers.4.post_attention_layernorm.weight"
    )


def test_shapes_follow_an_explicit_head_size() -> None:
    shapes = tensor_shapes(SPEC, {"layers.0.q": "q", "layers.0.k": "k", "layers.0.o": "o"})
    assert shapes == {"q": (96, 64), "k": (48, 64), "o": (64, 96)}
