"""Rotary frequencies against transformers' own, for every type and in both dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from orca_dist.errors import ModelError
from orca_dist.models.rope import inverse_frequencies
from orca_dist.spec import RopeSpec, RopeType, parse_rope
from tests.fixtures.ropes import HEAD_DIM, MAX_LEN, ROPES

THETA = 5e5


def spec_of(rope: Mapping[str, Any] | None = None, **config: Any) -> RopeSpec:
    parameters = {"rope_parameters": {"rope_theta": THETA, **rope}} if rope else {}
    return parse_rope({**parameters, **config}, head_dim=HEAD_DIM, max_len=MAX_LEN)


def refused(problem: str, rope: Any, **config: Any) -> None:
    with pytest.raises(ModelError, match=problem):
        spec_of(rope, **config)


def theirs(rope: Mapping[str, Any], **config: Any) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    made = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_LEN,
        rope_parameters={"rope_theta": THETA, **rope},
        **config,
    )
    embedding = LlamaRotaryEmbedding(made)
    return embedding.inv_freq, embedding.attention_scaling


@pytest.mark.parametrize("name", list(ROPES))
def test_frequencies_are_those_of_transformers(name: str) -> None:
    spec = spec_of(ROPES[name])
    wanted, scale = theirs(ROPES[name])
    torch.testing.assert_close(inverse_frequencies(spec, HEAD_DIM), wanted, rtol=1e-6, atol=0)
    assert spec.attention_factor == pytest.approx(scale, rel=1e-12)


def test_plain_frequencies_have_the_same_bits() -> None:
    """An angle is a position times a frequency: at 100,000 tokens a last bit shows."""
    wanted, _ = theirs({"rope_type": "default"})
    assert torch.equal(inverse_frequencies(spec_of({"rope_type": "default"}), HEAD_DIM), wanted)


def test_llama_3_at_its_real_size() -> None:
    rope = {**ROPES["llama3"], "factor": 8.0, "original_max_position_embeddings": 8192}
    parameters = {"rope_theta": THETA, **rope}
    spec = parse_rope({"rope_parameters": parameters}, head_dim=128, max_len=131072)
    wanted, _ = theirs(rope, head_dim=128)
    torch.testing.assert_close(inverse_frequencies(spec, 128), wanted, rtol=1e-6, atol=0)


def test_every_type_is_among_those_checked() -> None:
    assert {rope["rope_type"] for rope in ROPES.values()} == set(RopeType)


@pytest.mark.parametrize("name", list(ROPES))
def test_both_dialects_say_the_same(name: str) -> None:
    new = spec_of(ROPES[name])
    older = {key: value for key, value in ROPES[name].items() if key != "rope_type"}
    for key in ("type", "rope_type"):
        scaling = {**older, key: ROPES[name]["rope_type"]}
        assert spec_of(rope_scaling=scaling, rope_theta=THETA) == new


def test_the_older_dialect_counts_where_a_file_has_both() -> None:
    """As for transformers."""
    spec = spec_of({"rope_type": "default"}, rope_scaling={"type": "linear", "factor": 2.0})
    assert (spec.rope_type, spec.factor) == (RopeType.LINEAR, 2.0)


def test_an_original_length_beside_the_settings_counts() -> None:
    """Some files hold it at the top; it wins there, as for transformers."""
    spec = spec_of(ROPES["llama3"], original_max_position_embeddings=32)
    wanted, _ = theirs(ROPES["llama3"], original_max_position_embeddings=32)
    assert spec.original_max_len == 32
    torch.testing.assert_close(inverse_frequencies(spec, HEAD_DIM), wanted, rtol=1e-6, atol=0)


def test_a_yarn_without_a_factor_is_stretched_by_the_lengths() -> None:
    spec = spec_of({**ROPES["yarn"], "factor": None})
    assert spec.factor == MAX_LEN / ROPES["yarn"]["original_max_position_embeddings"]


BAD_ROPES = [
    ({"rope_type": "mrope"}, r"rope_type = 'mrope' is not supported; supported: default, linear"),
    ({"rope_type": "proportional", "factor": 2.0}, r"rope_type = 'proportional'"),
    ({"type": "su"}, r"rope_type = 'su'"),
    ({"rope_type": None}, r"rope_type = None"),
    ({"rope_type": "linear"}, r"factor = None: needs a positive number"),
    ({"rope_type": "linear", "factor": 0}, r"factor = 0: needs a positive number"),
    ({"rope_type": "dynamic", "factor": "two"}, r"factor = 'two'"),
    ({"rope_type": "default", "rope_theta": -1.0}, r"rope_theta = -1\.0"),
    ({**ROPES["llama3"], "low_freq_factor": None}, r"low_freq_factor = None"),
    ({**ROPES["llama3"], "low_freq_factor": 4.0}, r"low_freq_factor = 4\.0 must be less"),
    ({**ROPES["yarn"], "attention_factor": -1}, r"attention_factor = -1"),
    ({**ROPES["yarn"], "beta_fast": "32"}, r"beta_fast = '32'"),
    ({**ROPES["yarn"], "original_max_position_embeddings": 0}, r"original_max\w+ = 0"),
    ({**ROPES["longrope"], "short_factor": [1.0]}, r"short_factor needs 8 numbers"),
    ({**ROPES["longrope"], "long_factor": None}, r"long_factor needs 8 numbers"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
    ({"full_attention": {"rope_type": "default"}}, r"rope_parameters = .* holds for all layers"),
]


@pytest.mark.parametrize(("rope", "problem"), BAD_ROPES)
def test_what_is_not_supported_is_named(rope: Mapping[str, Any], problem: str) -> None:
    refused(problem, rope)


def test_settings_that_are_none_are_named() -> None:
    refused(r"rope_scaling = 2\.0", None, rope_scaling=2.0)
    refused(r"partial_rotary_factor = 0\.25", None, partial_rotary_factor=0.25)


def test_a_longrope_scales_by_its_lengths_unless_told_otherwise() -> None:
    rope = {key: value for key, value in ROPES["longrope"].items() if key != "attention_factor"}
    for factor in (8.0, None):
        _, scale = theirs({**rope, "factor": factor})
        assert spec_of({**rope, "factor": factor}).attention_factor == pytest.approx(scale)
    assert scale > 1.1


def test_a_longrope_that_would_change_with_the_length_is_refused() -> None:
    """Up to the original length it doesn't, and the short factors hold."""
    changing = {**ROPES["longrope"], "long_factor": [8.0] * (HEAD_DIM // 2)}
    refused(r"beyond 64 tokens longrope turns keys by long_factor", changing)
    original = {**changing, "original_max_position_embeddings": MAX_LEN}
    assert spec_of(original).divisors == tuple(ROPES["longrope"]["short_factor"])
