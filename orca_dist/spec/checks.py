"""Values of config.json, checked: each error names the key, the value and what it must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orca_dist.errors import ModelError


def positive_int(values: Mapping[str, Any], key: str) -> int:
    """A size or count; raises ModelError where it is missing or anything else."""
    value = values.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} = {value!r}: needs a positive whole number")
    return value


def positive(values: Mapping[str, Any], key: str) -> float:
    """A factor; raises ModelError where it is missing or anything else."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {key} = {value!r}: needs a positive number")
    return float(value)


def positive_or_none(values: Mapping[str, Any], key: str) -> float | None:
    """As `positive`; None where the value is null."""
    return None if values.get(key) is None else positive(values, key)


def positive_int_or(values: Mapping[str, Any], key: str, otherwise: int) -> int:
    """As `positive_int`; `otherwise` where the value is null."""
    return otherwise if values.get(key) is None else positive_int(values, key)


def one_of(key: str, value: object, supported: Iterable[str]) -> None:
    """Raises ModelError unless `value` is among `supported`."""
    if value not in tuple(supported):
        raise ModelError(
            f"config.json: {key} = {value!r} is not supported; supported: {', '.join(supported)}"
        )
