"""Rotary position embedding as config.json describes it, in both of its dialects.

`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (older; counts where
a file has both, as for transformers). A type whose frequencies would depend on how long
a request becomes is served only where they don't: the keys of earlier tokens stay in the
KV slots with the rotation that they got, and a token must not depend on the batch around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import log, sqrt
from typing import Any

from orca_dist.errors import ModelError
from orca_dist.spec.checks import one_of, positive, positive_int


class RopeType(StrEnum):
    """transformers' own names."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Frequencies are theta^(-2i/D), changed as `rope_type` says.

    `original_max_len` is the length in tokens that the model was first made for.
    `divisors` are longrope's, one a frequency. cos and sin are multiplied by `attention_factor`.
    """

    rope_type: RopeType = RopeType.DEFAULT
    theta: float
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0


def parse_rope(
    config: Mapping[str, Any], *, head_dim: int, max_len: int, theta: float = 10000.0
) -> RopeSpec:
    """The rotary settings of a config.json; `theta` is for a file that names none.

    Raises ModelError for a type that isn't supported and for values that can't be right.
    """
    rope = _settings(config, theta)
    one_of("rope_type", rope["rope_type"], RopeType)
    _refuse_partial(rope)
    theta = positive(rope, "rope_theta")
    match RopeType(rope["rope_type"]):
        case RopeType.DEFAULT:
            return RopeSpec(theta=theta)
        case (
            RopeType.LINEAR | RopeType.DYNAMIC as scaled
        ):  # dynamic: up to max_len all factors are 1
            return RopeSpec(rope_type=scaled, theta=theta, factor=positive(rope, "factor"))
        case RopeType.LLAMA3:
            return _llama3(rope, theta, _original_len(config, rope, max_len))
        case RopeType.YARN:
            return _yarn(rope, theta, _original_len(config, rope, max_len), max_len)
        case RopeType.LONGROPE:
            original_len = _original_len(config, rope, max_len)
            return _longrope(rope, theta, original_len, max_len, head_dim // 2)


def _settings(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """One dict, whichever way the file spells it."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(
            f"config.json: {name} = {rope!r} is not supported: needs one set of settings "
            "that holds for all layers"
        )
    rope = dict(rope)
    rope.setdefault("rope_theta", config.get("rope_theta") or theta)
    rope.setdefault("rope_type", rope.get("type", RopeType.DEFAULT.value))
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    return rope


def _refuse_partial(rope: Mapping[str, Any]) -> None:
    if rope["partial_rotary_factor"] not in (None, 1):
        raise ModelError(
            f"config.json: partial_rotary_factor = {rope['partial_rotary_factor']!r} is not "
            "supported: needs a model that rotates the whole of each head"
        )


def _original_len(config: Mapping[str, Any], rope: Mapping[str, Any], max_len: int) -> int:
    key = "original_max_position_embeddings"
    found = [values[key] for values in (config, rope) if values.get(key) is not None]
    return positive_int({key: found[0] if found else max_len}, key)


def _llama3(rope: Mapping[str, Any], theta: float, original_len: int) -> RopeSpec:
    low, high = positive(rope, "low_freq_factor"), positive(rope, "high_freq_factor")
    if low >= high:
        raise ModelError(
            f"config.json: low_freq_factor = {low} must be less than high_freq_factor = {high}"
        )
    return RopeSpec(
        rope_type=RopeType.LLAMA3,
        theta=theta,
        factor=positive(rope, "factor"),
        original_max_len=original_len,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Mapping[str, Any], theta: float, original_len: int, max_len: int) -> RopeSpec:
    factor = _factor(rope, original_len, max_len)
    return RopeSpec(
        rope_type=RopeType.YARN,
        theta=theta,
        factor=factor,
        original_max_len=original_len,
        beta_fast=positive({"beta_fast": rope.get("beta_fast") or 32}, "beta_fast"),
        beta_slow=positive({"beta_slow": rope.get("beta_slow") or 1}, "beta_slow"),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN (arXiv:2309.00071): 0.1 ln(factor) + 1 unless the file says another."""
    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        over, under = (positive(rope, key) for key in ("mscale", "mscale_all_dim"))
        return _magnitude(factor, over) / _magnitude(factor, under)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


def _longrope(
    rope: Mapping[str, Any], theta: float, original_len: int, max_len: int, num_divisors: int
) -> RopeSpec:
    short, long = (_divisors(rope, key, num_divisors) for key in ("short_factor", "long_factor"))
    if short != long and max_len > original_len:
        raise ModelError(
            f"config.json: max_position_embeddings = {max_len}: beyond {original_len} tokens "
            "longrope turns keys by long_factor, and those already stored were turned by "
            f"short_factor; set max_position_embeddings to at most {original_len}"
        )
    return RopeSpec(
        rope_type=RopeType.LONGROPE,
        theta=theta,
        original_max_len=original_len,
        divisors=short,
        attention_factor=_longrope_attention_factor(rope, original_len, max_len),
    )


def _divisors(rope: Mapping[str, Any], key: str, num_divisors: int) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != num_divisors:
        raise ModelError(f"config.json: {key} needs {num_divisors} numbers, half a head's size")
    return tuple(positive({key: value}, key) for value in values)


def _longrope_attention_factor(rope: Mapping[str, Any], original_len: int, max_len: int) -> float:
    """LongRoPE (arXiv:2402.13753): sqrt(1 + ln(factor) / ln(original length)) unless said."""
    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor")
    factor = _factor(rope, original_len, max_len)
    return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original_len))


def _factor(rope: Mapping[str, Any], original_len: int, max_len: int) -> float:
    """How far the model was stretched; null in the file means by as much as its lengths say."""
    return max_len / original_len if rope.get("factor") is None else positive(rope, "factor")
