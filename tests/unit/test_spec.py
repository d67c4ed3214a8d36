"""config.json's dialects, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orca_dist.errors import ModelError
from orca_dist.spec import ModelSpec, load_spec, parse_spec

BASE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}


def spec_of(**config: Any) -> ModelSpec:
    return parse_spec({**BASE, **config})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_rope_theta_however_spelled(rope: dict[str, Any]) -> None:
    assert spec_of(**rope).rope.theta == 5e5


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_never_ignored(key: str) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert spec_of(**{key: rope}).rope.factor == 4.0
    with pytest.raises(ModelError, match=r"rope_type = 'mrope' is not supported.*default"):
        spec_of(**{key: {"rope_type": "mrope"}})


def test_defaults_of_absent_keys() -> None:
    spec = spec_of()
    assert (spec.num_kv_heads, spec.head_dim) == (4, 16)
    assert (spec.rope.theta, spec.dtype, spec.eos_token_ids) == (10000.0, "float32", ())
    assert (spec.tie_word_embeddings, spec.biases) == (False, ())


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_however_spelled(key: str) -> None:
    assert spec_of(**{key: "bfloat16"}).dtype == "bfloat16"


def test_an_explicit_head_size_wins() -> None:
    assert spec_of(head_dim=32).head_dim == 32
    assert spec_of(head_dim=None).head_dim == 16


@pytest.mark.parametrize(("value", "want"), [(None, ()), (2, (2,)), ([2, 70], (2, 70))])
def test_one_or_many_eos(value: Any, want: tuple[int, ...]) -> None:
    assert spec_of(eos_token_id=value).eos_token_ids == want


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "qwen7"},
            r"model_type = 'qwen7' is not supported; supported: llama, mistral, qwen2",
        ),
        ({"model_type": None}, r"model_type = None"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config .*gptq.*unquant"),
        ({"compression_config": {"format": "int8"}}, r"compression_config"),
        ({"quantization_config": "int8"}, r"quantization_config .*int8"),
        ({"model_type": "llava", "vision_config": {"depth": 2}}, r"vision_config.*text model"),
        ({"hidden_size": None}, r"hidden_size = None: needs a positive whole number"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0"),
        ({"vocab_size": "many"}, r"vocab_size = 'many'"),
    ],
)
def test_refusals_name_key_and_value(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        spec_of(**config)


def test_kv_bytes_count_keys_and_values_of_all_layers() -> None:
    assert spec_of(num_key_value_heads=2).kv_bytes_per_token(4) == 2 * 5 * 2 * 16 * 4


def test_transformers_own_config_is_read(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(**{**BASE, "rope_theta": 5e5, "num_key_value_heads": 2}).save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    assert (spec.rope.theta, spec.num_kv_heads, spec.rms_norm_eps) == (5e5, 2, 1e-6)


def test_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE), encoding="utf-8")
    assert load_spec(tmp_path).num_layers == 5
