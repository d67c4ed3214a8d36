"""What each family reads of config.json, against transformers' own defaults and modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from orca_dist.errors import ModelError
from orca_dist.spec import FAMILIES, Activation, Experts, ModelSpec, NormPlacement, parse_spec
from orca_dist.weights import model_tensors, tensor_shapes
from orca_dist.weights.names import LM_HEAD
from tests.fixtures.families import VARIANTS

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SLIDES = {"use_sliding_window": True, "sliding_window": 9}
FULL, SLIDING = "full_attention", "sliding_attention"


def spec_of(model_type: str, **config: Any) -> ModelSpec:
    return parse_spec({**SIZES, "model_type": model_type, **config})


def without_ends(spec: ModelSpec) -> ModelSpec:
    """A file that names no end of text has none; transformers' classes may."""
    return dataclasses.replace(spec, eos_token_ids=(), dtype="")


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_keys_that_a_file_leaves_out_are_as_in_transformers(model_type: str) -> None:
    """40 layers, so that rules of every 4th or from the 28th on show; 64 heads for 8 or 32."""
    from transformers import AutoConfig

    sizes = {**SIZES, "num_hidden_layers": 40, "hidden_size": 2048, "num_attention_heads": 64}
    del sizes["num_key_value_heads"]
    theirs = AutoConfig.for_model(model_type, **sizes).to_dict()
    ours = parse_spec({**sizes, "model_type": model_type})
    assert without_ends(ours) == without_ends(parse_spec(theirs))


@pytest.mark.parametrize("name", list(VARIANTS))
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy({**SIZES, "pad_token_id": 0, **VARIANTS[name]})
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(made).state_dict()
    spec = parse_spec(made.to_dict())
    ours = tensor_shapes(spec, model_tensors(spec, frozenset({LM_HEAD})))
    assert ours == dict(each for item in theirs.items() for each in as_saved(spec, *item))


def as_saved(spec: ModelSpec, name: str, tensor: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A tensor's name and shape in a file, where each expert has its own."""
    is_mixtral = spec.model_type == "mixtral"
    name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    prefix, _, module = name.rpartition("experts.")
    if module not in ("gate_up_proj", "down_proj"):
        yield name, tuple(tensor.shape)
        return
    for number, each in enumerate(tensor):
        halves = each.chunk(2) if module == "gate_up_proj" else (each,)
        for part, half in zip((gate, up) if len(halves) == 2 else (down,), halves, strict=True):
            yield f"{prefix}experts.{number}.{part}.weight", tuple(half.shape)


def test_every_family_has_variants() -> None:
    assert {config["model_type"] for config in VARIANTS.values()} == set(FAMILIES)


def test_who_rounds_late() -> None:
    """In bf16 it shows in last bits only, which no comparison of likeliest tokens notices."""
    specs = {name: spec_of(name) for name in FAMILIES}
    assert [name for name, spec in specs.items() if spec.rounds_late] == ["olmo2", "gemma2"]
    assert [name for name, spec in specs.items() if spec.rotates_wide] == ["olmo2"]
    mixtures = {name: spec.experts for name, spec in specs.items() if spec.experts}
    assert list(mixtures) == ["mixtral", "qwen3_moe"]
    assert [each.rounds_shares for each in mixtures.values()] == [False, True]


def test_gemma2_by_itself() -> None:
    spec = spec_of("gemma2", hidden_size=100)
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 30.0)
    assert (spec.attention_scale, spec.head_dim) == (1 / 16, 256)
    assert (spec.embedding_multiplier, spec.rounds_multiplier) == (10.0, True)
    assert (spec.activation, spec.norms) == (Activation.GELU_TANH, NormPlacement.BOTH)
    assert (spec.norm_adds_one, spec.tie_word_embeddings) == (True, True)


def test_scores_are_scaled_by_what_the_file_says_and_not_by_the_heads_size() -> None:
    spec = spec_of("gemma2", head_dim=128, query_pre_attn_scalar=144)
    assert spec.attention_scale == pytest.approx(1 / 12)


def test_a_cap_of_null_is_none() -> None:
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = spec_of("gemma2", **nulls)
    assert (spec.attention_softcap, spec.logits_softcap) == (None, None)


def test_each_family_has_its_own_key_for_the_activation() -> None:
    """As in transformers: published files of Gemma 2 have both, and one of them counts."""
    assert spec_of("gemma2", hidden_act="relu").activation is Activation.GELU_TANH
    assert spec_of("gemma2", hidden_activation="silu").activation is Activation.SILU
    assert spec_of("llama", hidden_activation="relu").activation is Activation.SILU
    assert spec_of("llama", hidden_act="gelu_pytorch_tanh").activation is Activation.GELU_TANH


def test_activations_are_called_as_the_kernels_call_them() -> None:
    import orca_kernels

    assert [*Activation] == [*orca_kernels.Activation]


def test_a_key_of_another_family_has_no_effect() -> None:
    """As in transformers, where a class reads its own keys only."""
    foreign = {"attention_multiplier": 3.0, "no_rope_layers": [0] * 5, "logits_scaling": 2.0}
    assert spec_of("llama", **foreign, **SLIDES) == spec_of("llama")
    assert spec_of("llama", attn_logit_softcapping=5.0, query_pre_attn_scalar=9) == spec_of("llama")
    assert spec_of("qwen2", attention_bias=False) == spec_of("qwen2")
    assert spec_of("qwen2").biases == ("q", "k", "v")


def test_which_layers_slide() -> None:
    assert spec_of("mistral", sliding_window=9).sliding_layers == (0, 1, 2, 3, 4)
    assert spec_of("mistral", sliding_window=None).sliding_layers == ()
    assert spec_of("qwen2", sliding_window=9, max_window_layers=2).sliding_layers == ()
    assert spec_of("qwen2", **SLIDES, max_window_layers=2).sliding_layers == (2, 3, 4)
    assert spec_of("qwen3", **SLIDES, max_window_layers=9).sliding_layers == ()
    assert spec_of("smollm3", **SLIDES, no_rope_layers=[1, 0, 1, 1, 0]).sliding_layers == (1, 4)
    assert spec_of("gemma2").sliding_layers == (0, 2, 4)
    assert spec_of("gemma2", sliding_window=None).sliding_layers == ()
    assert spec_of("gemma2", layer_types=[FULL, SLIDING, *[FULL] * 3]).sliding_layers == (1,)
    listed = spec_of("qwen2", **SLIDES, layer_types=[FULL, SLIDING, FULL, FULL, SLIDING])
    assert [listed.window(index) for index in range(5)] == [None, 9, None, None, 9]


def test_which_layers_are_rotated() -> None:
    assert spec_of("smollm3").unrotated_layers == (3,)
    assert spec_of("smollm3", no_rope_layer_interval=2).unrotated_layers == (1, 3)
    listed = spec_of("smollm3", no_rope_layers=[1, 0, 1, 1, 0, 0])  # longer than the model
    assert [listed.is_rotated(index) for index in range(5)] == [True, False, True, True, False]


def test_mixtral_by_itself() -> None:
    spec = spec_of("mixtral")
    assert spec.experts == Experts(
        num_experts=8,
        num_chosen=2,
        intermediate_size=96,
        normalised=True,
        rounds_shares=False,
        layers=(0, 1, 2, 3, 4),
    )
    assert (spec.rope.theta, spec.sliding_layers) == (1e6, ())
    assert spec_of("mixtral", norm_topk_prob=False, decoder_sparse_step=2) == spec


def test_which_layers_have_experts() -> None:
    spec = spec_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1, 99])
    assert [spec.experts_of(index) is not None for index in range(5)] == [False] * 3 + [True, False]
    assert spec.experts is not None
    assert (spec.experts.intermediate_size, spec.intermediate_size) == (768, 96)
    assert spec_of("llama", num_local_experts=8, num_experts_per_tok=2) == spec_of("llama")


def test_the_number_of_experts_has_two_spellings() -> None:
    """transformers 4 wrote num_experts for Qwen3, and 5 writes num_local_experts."""
    older, newer = ({key: 9} for key in ("num_experts", "num_local_experts"))
    for model_type in ("mixtral", "qwen3_moe"):
        spec = spec_of(model_type, **older)
        assert spec == spec_of(model_type, **newer) == spec_of(model_type, **older, **newer)
        assert spec.experts is not None
        assert spec.experts.num_experts == 9


BAD = [
    ("qwen2", {**SLIDES, "layer_types": [FULL]}, r"layer_types needs 5 names"),
    ("qwen2", {**SLIDES, "layer_types": ["chunked_attention"] * 5}, r"'chunked_attention' is not"),
    ("qwen2", {"layer_types": [SLIDING] * 5}, r"layer_types says sliding_attention for layers \[0"),
    ("smollm3", {"sliding_window": 9, "layer_types": [SLIDING] * 5}, r"it can't be known"),
    ("mistral", {"sliding_window": 9, "layer_types": [FULL] * 5}, r"layers \[\], but .* \[0, 1, 2"),
    ("llama", {"layer_types": [FULL] * 4 + [SLIDING]}, r"for layers \[4\], but .* for \[\]"),
    ("mistral", {"sliding_window": 0}, r"sliding_window = 0: needs a positive whole number"),
    ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers needs 5 numbers"),
    ("smollm3", {"no_rope_layer_interval": 0}, r"no_rope_layer_interval = 0"),
    ("granite", {"logits_scaling": 0}, r"logits_scaling = 0: needs a positive number"),
    ("granite", {"residual_multiplier": None}, r"residual_multiplier = None"),
    ("olmo2", {"num_key_value_heads": 3}, r"num_key_value_heads = 3 must divide .* = 4"),
    ("qwen3", {"max_position_embeddings": "long"}, r"max_position_embeddings = 'long'"),
    ("qwen2", {**SLIDES, "max_window_layers": "some"}, r"max_window_layers = 'some'"),
    ("llama", {"num_key_value_heads": "two"}, r"num_key_value_heads = 'two'"),
    ("llama", {"num_key_value_heads": 0}, r"num_key_value_heads = 0"),
    ("llama", {"head_dim": -1}, r"head_dim = -1"),
    ("llama", {"rms_norm_eps": None}, r"rms_norm_eps = None"),
    ("gemma2", {"attn_logit_softcapping": 0}, r"attn_logit_softcapping = 0: needs a positive"),
    ("gemma2", {"final_logit_softcapping": "30"}, r"final_logit_softcapping = '30': needs"),
    ("gemma2", {"query_pre_attn_scalar": None}, r"query_pre_attn_scalar = None: needs a positive"),
    ("gemma2", {"hidden_activation": "gelu"}, r"hidden_activation = 'gelu' is not .* gelu_pytorch"),
    ("gemma2", {"hidden_activation": None}, r"hidden_activation = None is not supported"),
    ("gemma2", {"use_bidirectional_attention": True}, r"use_bidirectional_attention = True is not"),
    ("gemma2", {"sliding_window": None, "layer_types": [SLIDING] * 5}, r"it can't be known"),
    ("gemma3_text", {}, r"model_type = 'gemma3_text' is not supported; supported: llama, mistral"),
    ("qwen2_moe", {}, r"model_type = 'qwen2_moe' is not supported; .* mixtral, qwen3_moe"),
    ("deepseek_v3", {}, r"model_type = 'deepseek_v3' is not supported"),
    ("mixtral", {"num_local_experts": 0}, r"num_local_experts = 0: needs a positive whole number"),
    ("mixtral", {"num_local_experts": None}, r"num_local_experts = None: needs a positive"),
    (
        "mixtral",
        {"num_experts_per_tok": 9},
        r"per_tok = 9 must be at most the number of experts, 8",
    ),
    ("mixtral", {"num_experts_per_tok": 0}, r"num_experts_per_tok = 0: needs a positive"),
    ("qwen3_moe", {"num_experts": 4}, r"per_tok = 8 must be at most the number of experts, 4"),
    ("qwen3_moe", {"num_experts": "many"}, r"num_experts = 'many': needs a positive"),
    ("qwen3_moe", {"num_experts": 8, "num_local_experts": 9}, r"= 9 and num_experts = 8: it can't"),
    ("qwen3_moe", {"moe_intermediate_size": None}, r"moe_intermediate_size = None: needs"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, r"decoder_sparse_step = 0: needs a positive"),
    ("qwen3_moe", {"mlp_only_layers": 3}, r"mlp_only_layers = 3: needs a list of layers"),
    ("qwen3_moe", {"mlp_only_layers": ["3"]}, r"mlp_only_layers = \['3'\]: needs a list"),
    ("qwen3_moe", {**SLIDES, "layer_types": [FULL] * 5}, r"it can't be known which is meant"),
]


@pytest.mark.parametrize(("model_type", "config", "problem"), BAD)
def test_what_can_not_be_served_right_is_refused(
    model_type: str, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        spec_of(model_type, **config)


def test_layer_types_that_say_what_holds_anyway_are_fine() -> None:
    assert spec_of("llama", layer_types=[FULL] * 5) == spec_of("llama")
    slides = spec_of("mistral", sliding_window=9, layer_types=[SLIDING] * 5)
    assert slides == spec_of("mistral", sliding_window=9)
