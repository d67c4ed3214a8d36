"""Which layers of a model differ from the others: those with a window, those without rotation.

Indices count over the whole model, whatever stage holds a layer.
"""

from __future__ import annotations

from typing import Any

from orca_dist.errors import ModelError
from orca_dist.spec.checks import positive_int
from orca_dist.spec.families import Keys, Windows

FULL, SLIDING = "full_attention", "sliding_attention"


def unrotated_layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """Those without rotary embedding: by a list of 1 and 0 (0: without), or every nth."""
    listed = keys["no_rope_layers"]
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < num_layers:
            raise ModelError(f"config.json: no_rope_layers needs {num_layers} numbers")
        return tuple(index for index in range(num_layers) if not listed[index])
    if keys["no_rope_layer_interval"] is None:
        return ()
    interval = positive_int(keys, "no_rope_layer_interval")
    return tuple(range(interval - 1, num_layers, interval))


def sliding_layers(
    keys: Keys, listed: Any, num_layers: int, windows: Windows, unrotated: tuple[int, ...]
) -> tuple[int, ...]:
    """Those that see a window only; `listed` is the file's own layer_types, or None.

    Raises ModelError for a kind of layer that isn't supported, or one that the family can't have.
    """
    has_window = keys["sliding_window"] is not None and keys["use_sliding_window"]
    made = _made(keys, num_layers, windows, unrotated) if has_window else ()
    if listed is None:
        return made
    chosen = _listed(listed, num_layers)
    if (chosen and not has_window) or (windows is Windows.ALL and chosen != made):
        raise ModelError(
            f"config.json: layer_types says {SLIDING} for layers {list(chosen)}, "
            f"but its other keys for {list(made)}: it can't be known which is meant"
        )
    return chosen


def _made(
    keys: Keys, num_layers: int, windows: Windows, unrotated: tuple[int, ...]
) -> tuple[int, ...]:
    if windows is Windows.UNROTATED:
        return unrotated
    if windows is Windows.EVEN:
        return tuple(range(0, num_layers, 2))
    first = keys["max_window_layers"] if windows is Windows.UPPER else 0
    if not isinstance(first, int) or first < 0:
        raise ModelError(f"config.json: max_window_layers = {first!r}: needs a whole number")
    return tuple(range(first, num_layers))


def _listed(listed: Any, num_layers: int) -> tuple[int, ...]:
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise ModelError(f"config.json: layer_types needs {num_layers} names, one a layer")
    for name in listed:
        if name not in (FULL, SLIDING):
            raise ModelError(
                f"config.json: layer_types: {name!r} is not supported; supported: {FULL}, {SLIDING}"
            )
    return tuple(index for index, name in enumerate(listed) if name == SLIDING)
