"""What a model folder holds, as plain data for a person or a script."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from orca_dist.spec import RopeSpec, load_spec
from orca_dist.weights.source import check_source


def describe(folder: Path) -> dict[str, Any]:
    """The spec's fields, and `folder`, `parameters`, `weights_bytes`, `tensors_by_dtype`, `shards`.

    Of `rope` what its type doesn't use is left out. Verifies the folder first: raises
    ModelError naming what is missing or damaged.
    """
    spec = load_spec(folder)
    headers = check_source(folder, spec)
    return {
        "folder": str(folder),
        **asdict(spec, dict_factory=_plain),
        "rope": _rope(spec.rope),
        "parameters": sum(prod(header.shape) for header in headers.values()),
        "weights_bytes": sum(header.num_bytes for header in headers.values()),
        "tensors_by_dtype": dict(Counter(header.dtype for header in headers.values())),
        "shards": sorted({header.shard for header in headers.values()}),
    }


def _rope(rope: RopeSpec) -> dict[str, Any]:
    unused = asdict(RopeSpec(theta=rope.theta))
    facts = asdict(rope, dict_factory=_plain)
    always = ("rope_type", "theta")
    return {key: facts[key] for key in facts if key in always or facts[key] != unused[key]}


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Members of a StrEnum as their text, also where a dict is printed."""
    return {key: str(value) if isinstance(value, str) else value for key, value in items}
