"""The rotary settings of a GGUF file, as config.json's `rope_parameters`.

Two things stretch the frequencies there: metadata keys (linear, YaRN), and a tensor that
divides each of them (Llama 3.1 and later). What the tensor holds was made by llama3's
formula, so its parameters are found again; divisors that no parameters give are kept as
they are, as longrope's. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, pi
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from orca_dist.errors import ModelError
from orca_dist.weights.gguf_file import GgufFile, shortest

DIVISORS = "rope_freqs.weight"

_DIVIDED = "llama"  # the one architecture whose frequencies a tensor may divide
_NEUTRAL: Mapping[str, tuple[float, ...]] = {  # YaRN's knobs that config.json has no word for
    "yarn_ext_factor": (-1.0, 1.0),
    "yarn_attn_factor": (1.0,),
    "yarn_log_multiplier": (0.0,),
}
_MIN_RAMP = 2  # points that make a line
_CLOSE = 1e-5

Rope = dict[str, Any]


def rope_parameters(source: GgufFile, *, head_dim: int, max_len: int) -> Rope:
    """Raises ModelError naming what can't be said in config.json."""
    _refuse_partial(source, head_dim)
    rope = _of_metadata(source, max_len)
    theta = source.number(_key(source, "freq_base"), 10000.0)
    if DIVISORS in source.tensors:
        _refuse_foreign_divisors(source)
        if rope["rope_type"] != "default":
            raise ModelError(
                f"{source.path}: rope scaling {rope['rope_type']!r} and the tensor {DIVISORS} "
                "at once are not supported"
            )
        rope = _of_divisors(_divisors(source, head_dim), theta, max_len)
    return {**rope, "rope_theta": theta}


def _key(source: GgufFile, name: str) -> str:
    return f"{source.architecture}.rope.{name}"


def _scaling(source: GgufFile, name: str) -> str:
    return _key(source, f"scaling.{name}")


def _refuse_foreign_divisors(source: GgufFile) -> None:
    if source.architecture != _DIVIDED:
        raise ModelError(
            f"{source.path}: the tensor {DIVISORS} has no place in a {source.architecture} model"
        )


def _refuse_partial(source: GgufFile, head_dim: int) -> None:
    rotary = source.get(_key(source, "dimension_count"), head_dim)
    if rotary != head_dim:
        raise ModelError(
            f"{source.path}: rotary embedding of {rotary} of {head_dim} head dimensions "
            "is not supported; it must cover all of them"
        )


# ---- metadata ----------------------------------------------------------


def _of_metadata(source: GgufFile, max_len: int) -> Rope:
    """A file that names a factor and no type means linear; a factor of 0 means none."""
    kind = source.get(_scaling(source, "type"), "linear")
    older = source.number(_key(source, "scale_linear"), 0.0)
    factor = source.number(_scaling(source, "factor"), older)
    if kind == "yarn":
        return _yarn(source, factor or 1.0, max_len)
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{source.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn"
        )
    _refuse_others(source, {"attn_factor": (1.0,)})
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": factor}


def _yarn(source: GgufFile, factor: float, max_len: int) -> Rope:
    _refuse_others(source, _NEUTRAL)
    attention = source.number(_scaling(source, "attn_factor"), 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": source.count(
            _scaling(source, "original_context_length"), max_len
        ),
        "attention_factor": attention * (0.1 * log(max(factor, 1.0)) + 1.0),
        "beta_fast": source.number(_scaling(source, "yarn_beta_fast"), 32.0),
        "beta_slow": source.number(_scaling(source, "yarn_beta_slow"), 1.0),
    }


def _refuse_others(source: GgufFile, neutral: Mapping[str, tuple[float, ...]]) -> None:
    for name, values in neutral.items():
        key = _scaling(source, name)
        value = source.number(key, values[0])
        if value not in values:
            raise ModelError(f"{source.path}: {key} = {value} is not supported")


# ---- divisors ----------------------------------------------------------


def _divisors(source: GgufFile, head_dim: int) -> np.ndarray:
    tensor = source.tensors[DIVISORS]
    if tensor.tensor_type != GGMLQuantizationType.F32 or source.shape(DIVISORS) != (head_dim // 2,):
        raise ModelError(
            f"{source.path}: the tensor {DIVISORS} is {tensor.tensor_type.name} "
            f"{list(source.shape(DIVISORS))}, must be F32 [{head_dim // 2}]"
        )
    divisors = np.asarray(tensor.data, np.float64)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise ModelError(f"{source.path}: the tensor {DIVISORS} must hold positive numbers only")
    return divisors


def _of_divisors(divisors: np.ndarray, theta: float, max_len: int) -> Rope:
    turns = theta ** -(np.arange(len(divisors)) / len(divisors)) / (2 * pi)
    found = _llama3(divisors, turns)
    if found and np.allclose(_llama3_divisors(found, turns), divisors, rtol=_CLOSE, atol=0):
        return found
    values = [shortest(divisor) for divisor in divisors]
    return {
        "rope_type": "longrope",
        "short_factor": values,
        "long_factor": values,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": max_len,
    }


def _llama3(divisors: np.ndarray, turns: np.ndarray) -> Rope | None:
    """The parameters whose ramp lies closest, with a low_freq_factor of 1.

    Between the two ends the kept share is a line over a wave's turns a token:
    kept = (original_len * turns - low) / (high - low), which fixes the three up to one scale.
    """
    factor = divisors.max()
    ramp = (divisors > 1) & (divisors < factor)
    if ramp.sum() < _MIN_RAMP:
        return None
    kept = (1 / divisors[ramp] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(turns[ramp], kept, 1)
    if offset >= 0:
        return None
    return {
        "rope_type": "llama3",
        "factor": shortest(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(float(1 - 1 / offset), 3),
        "original_max_position_embeddings": round(float(-slope / offset)),
    }


def _llama3_divisors(rope: Rope, turns: np.ndarray) -> np.ndarray:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = (rope["original_max_position_embeddings"] * turns - low) / (high - low)
    kept = kept.clip(0, 1)
    divisors: np.ndarray = 1 / ((1 - kept) / rope["factor"] + kept)
    return divisors
