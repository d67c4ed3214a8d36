"""Rotary settings of GGUF files: the folder computes what the equivalent one does, or a refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from orca_dist.errors import ModelError
from orca_dist.models.rope import inverse_frequencies
from orca_dist.spec import RopeSpec, load_spec, parse_rope
from orca_dist.weights.gguf import convert_gguf
from orca_dist.weights.gguf_file import GgufFile
from orca_dist.weights.gguf_rope import rope_parameters
from tests.fixtures.checkpoints import loud_model
from tests.fixtures.ggufs import llama_gguf
from tests.fixtures.ropes import HEAD_DIM, ROPES

PROMPT = torch.arange(3, 153)[None]
SCALING = "llama.rope.scaling."
YARN = {
    SCALING + "type": "yarn",
    SCALING + "factor": 4.0,
    SCALING + "original_context_length": 64,
}


def original(folder: Path, rope: Mapping[str, Any]) -> Path:
    """One layer with values that bf16 holds exactly, in fp32."""
    from transformers import LlamaForCausalLM

    parameters = {"rope_theta": 10000.0, **rope}
    config = {"model_type": "llama", "num_hidden_layers": 1, "rope_parameters": parameters}
    model = LlamaForCausalLM.from_pretrained(loud_model(folder, config), dtype=torch.bfloat16)
    model.float().save_pretrained(folder)
    return folder


def converted(
    tmp_path: Path,
    folder: Path,
    metadata: Mapping[str, Any] | None = None,
    divisors: np.ndarray | None = None,
) -> Path:
    extra = {} if divisors is None else {"rope_freqs.weight": divisors}
    source = llama_gguf(tmp_path / "m.gguf", folder, metadata=metadata, extra=extra)
    return convert_gguf(source, tmp_path / "out")


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        made: torch.Tensor = model(PROMPT).logits
    return made


def llama3_divisors(
    *,
    head_dim: int = HEAD_DIM,
    theta: float = 10000.0,
    factor: float = 4.0,
    low: float = 1.0,
    high: float = 4.0,
    original_len: int = 64,
) -> np.ndarray:
    """As the converter of Llama 3.1 makes them, wave by wave."""
    divisors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * theta ** (i / head_dim)
        kept = (original_len / wave - low) / (high - low)
        if wave < original_len / high:
            divisors.append(1.0)
        elif wave > original_len / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - kept) / factor + kept))
    return np.array(divisors, np.float32)


# ---- the same logits ---------------------------------------------------


LINEAR = {SCALING + "type": "linear", SCALING + "factor": 4.0}
METADATA = [
    ("linear", LINEAR),
    ("linear", {SCALING + "factor": 4.0}),
    ("linear", {"llama.rope.scale_linear": 4.0}),
    ("default", {SCALING + "type": "none", SCALING + "factor": 4.0}),
    ("default", {SCALING + "type": "linear", SCALING + "factor": 0.0}),
    ("yarn, plain", YARN),
    ("yarn", {**YARN, SCALING + "yarn_beta_fast": 8.0, SCALING + "yarn_beta_slow": 0.5}),
]


@pytest.mark.parametrize(("name", "metadata"), METADATA)
def test_scaling_keys_become_settings(tmp_path: Path, name: str, metadata: dict[str, Any]) -> None:
    folder = original(tmp_path / "original", ROPES[name])
    out = converted(tmp_path, folder, metadata)
    assert load_spec(out).rope == load_spec(folder).rope
    assert torch.equal(logits(out), logits(folder))


def test_a_scale_of_attention_is_kept(tmp_path: Path) -> None:
    """llama.cpp multiplies YaRN's own by it."""
    rope = {**ROPES["yarn, plain"], "attention_factor": 1.5 * (0.1 * math.log(4.0) + 1)}
    folder = original(tmp_path / "original", rope)
    out = converted(tmp_path, folder, {**YARN, SCALING + "attn_factor": 1.5})
    torch.testing.assert_close(logits(out), logits(folder), atol=1e-4, rtol=0)


def test_llama3_is_found_again(tmp_path: Path) -> None:
    folder = original(tmp_path / "original", ROPES["llama3"])
    out = converted(tmp_path, folder, divisors=llama3_divisors())
    assert load_spec(out).rope == load_spec(folder).rope
    assert torch.equal(logits(out), logits(folder))


def test_other_divisors_are_kept_as_they_are(tmp_path: Path) -> None:
    """transformers has a type that takes them; so has the pipeline."""
    folder = original(tmp_path / "original", ROPES["longrope"])
    divisors = np.array(ROPES["longrope"]["short_factor"], np.float32)
    out = converted(tmp_path, folder, divisors=divisors)
    torch.testing.assert_close(logits(out), logits(folder), atol=1e-4, rtol=0)
    ours, theirs = (inverse_frequencies(load_spec(f).rope, HEAD_DIM) for f in (out, folder))
    assert torch.equal(ours, theirs)


def test_older_readers_find_the_settings_too(tmp_path: Path) -> None:
    """They read rope_scaling alone, and would serve without it silently."""
    folder = original(tmp_path / "original", ROPES["linear"])
    config = json.loads((converted(tmp_path, folder, LINEAR) / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "linear"
    assert config["rope_theta"] == 10000.0


# ---- divisors of real models, without their weights --------------------

REAL = [
    {"head_dim": 128, "theta": 5e5, "factor": 8.0, "original_len": 8192},  # Llama 3.1
    {"head_dim": 64, "theta": 5e5, "factor": 32.0, "original_len": 8192},  # Llama 3.2 1B
    {"head_dim": 128, "theta": 5e5, "factor": 16.0, "low": 2.0, "high": 8.0, "original_len": 16384},
    {"head_dim": 128, "theta": 1e4, "factor": 8.0, "high": 32.0, "original_len": 2048},
]


@pytest.mark.parametrize("parameters", REAL)
def test_frequencies_of_real_sizes(tmp_path: Path, parameters: dict[str, Any]) -> None:
    head_dim, theta = parameters["head_dim"], parameters["theta"]
    rope = found(tmp_path, llama3_divisors(**parameters), head_dim, theta)
    assert rope.rope_type == "llama3"
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    wanted = (plain / torch.from_numpy(llama3_divisors(**parameters))).float()
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("parameters", REAL[:2])
def test_parameters_of_real_models(tmp_path: Path, parameters: dict[str, Any]) -> None:
    rope = found(tmp_path, llama3_divisors(**parameters), parameters["head_dim"], 5e5)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert (rope.factor, rope.original_max_len) == (parameters["factor"], 8192)


@pytest.mark.parametrize(
    "divisors",
    [
        np.ones(8),
        np.linspace(1, 4, 8),
        np.array([1, 1, 1, 1, 2, 4, 4, 4]),
        np.array([1, 1, 2, 4, 1, 1, 3, 4]),
        np.array([0.5, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_divisors_of_any_kind_divide(tmp_path: Path, divisors: np.ndarray) -> None:
    rope = found(tmp_path, divisors.astype(np.float32), 16, 10000.0)
    plain = inverse_frequencies(RopeSpec(theta=10000.0), 16)
    torch.testing.assert_close(
        inverse_frequencies(rope, 16), (plain / torch.from_numpy(divisors)).float()
    )


def found(
    tmp_path: Path, divisors: np.ndarray, head_dim: int, theta: float, max_len: int = 131072
) -> RopeSpec:
    """What is read from a file that holds these divisors and no weights."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_rope_freq_base(theta)
    writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufFile(tmp_path / "m.gguf")
    rope = rope_parameters(source, head_dim=head_dim, max_len=max_len)
    return parse_rope({"rope_parameters": rope}, head_dim=head_dim, max_len=max_len)


# ---- refusals ----------------------------------------------------------

BAD = [
    ({SCALING + "type": "longrope"}, r"rope scaling 'longrope' is not supported; .*none, linear"),
    ({**LINEAR, SCALING + "attn_factor": 2.0}, r"scaling\.attn_factor = 2\.0 is not supported"),
    ({**YARN, SCALING + "yarn_ext_factor": 0.5}, r"yarn_ext_factor = 0\.5"),
    ({**YARN, SCALING + "yarn_log_multiplier": 0.1}, r"yarn_log_multiplier = 0\.1"),
    ({SCALING + "factor": "four"}, r"scaling\.factor = 'four': needs a number"),
    ({**YARN, SCALING + "original_context_length": 0}, r"original_context_length = 0"),
    ({SCALING + "factor": -2.0}, r"factor = -2\.0: needs a positive number"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original(tmp_path_factory.mktemp("plain"), ROPES["default"])


@pytest.mark.parametrize(("metadata", "problem"), BAD)
def test_what_config_json_can_not_say_is_refused(
    plain: Path, tmp_path: Path, metadata: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        converted(tmp_path, plain, metadata)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("divisors", "problem"),
    [
        (np.ones(4, np.float32), r"rope_freqs\.weight is F32 \[4\], must be F32 \[8\]"),
        (np.ones(8, np.float16), r"rope_freqs\.weight is F16 \[8\], must be F32 \[8\]"),
        (np.zeros(8, np.float32), r"rope_freqs\.weight must hold positive numbers"),
        (np.full(8, np.nan, np.float32), r"rope_freqs\.weight must hold positive numbers"),
    ],
)
def test_divisors_that_can_not_be_are_refused(
    plain: Path, tmp_path: Path, divisors: np.ndarray, problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        converted(tmp_path, plain, divisors=divisors)


def test_both_ways_at_once_are_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'linear' and the tensor rope_freqs\.weight at once"):
        converted(tmp_path, plain, LINEAR, llama3_divisors())
