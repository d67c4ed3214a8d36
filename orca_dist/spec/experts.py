"""Mixtures of experts: which layers have one, how many experts there are, how many a row takes.

Indices count over the whole model, whatever stage holds a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from orca_dist.errors import ModelError
from orca_dist.spec.checks import positive_int
from orca_dist.spec.families import Family, Keys

SPELLINGS = ("num_local_experts", "num_experts")  # either, to transformers too


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """They take the place of the MLP in `layers`; each is a gated MLP, `intermediate_size` wide.

    A row goes through the `num_chosen` that its router finds likeliest, and their outputs are added
    by how likely each is. `normalised`: among those chosen, and not among all. `rounds_shares`:
    rounded to the type that the model runs in.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalised: bool
    rounds_shares: bool
    layers: tuple[int, ...]


def read_experts(config: Keys, keys: Keys, family: Family, num_layers: int) -> Experts | None:
    """None in a family that has none. Raises ModelError for values that can't be right."""
    if "num_experts_per_tok" not in family.keys:
        return None
    num_experts, num_chosen = _num_experts(config, keys), positive_int(keys, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok = {num_chosen} must be at most the number of "
            f"experts, {num_experts}"
        )
    return Experts(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=_intermediate_size(config, keys, family),
        normalised=bool(keys["norm_topk_prob"]),
        rounds_shares=family.rounds_shares,
        layers=_layers(keys, num_layers),
    )


def _num_experts(config: Keys, keys: Keys) -> int:
    said = {key: config[key] for key in SPELLINGS if key in config}
    if len(set(map(repr, said.values()))) > 1:
        both = " and ".join(f"{key} = {value!r}" for key, value in said.items())
        raise ModelError(f"config.json: {both}: it can't be known which is meant")
    first, _ = SPELLINGS
    said = said or {first: keys[first]}
    return positive_int(said, next(iter(said)))


def _intermediate_size(config: Keys, keys: Keys, family: Family) -> int:
    key = "moe_intermediate_size"
    return (
        positive_int(keys, key) if key in family.keys else positive_int(config, "intermediate_size")
    )


def _layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """Every nth, but for those that are listed as having a plain MLP."""
    step, plain = positive_int(keys, "decoder_sparse_step"), keys["mlp_only_layers"] or []
    if not isinstance(plain, list) or not all(isinstance(each, int) for each in plain):
        raise ModelError(f"config.json: mlp_only_layers = {plain!r}: needs a list of layers")
    return tuple(each for each in range(step - 1, num_layers, step) if each not in plain)
