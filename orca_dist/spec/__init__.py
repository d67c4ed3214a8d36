"""A model's shapes and rules, from Hugging Face's config.json. Pure: no torch, no tensor."""

from orca_dist.spec.experts import Experts
from orca_dist.spec.families import (
    ATTENTION,
    FAMILIES,
    MLP,
    Activation,
    NormPlacement,
    QkNorm,
)
from orca_dist.spec.model import ModelSpec, load_spec, parse_spec, refuse_adapter, token_ids
from orca_dist.spec.rope import RopeSpec, RopeType, parse_rope

__all__ = [
    "ATTENTION",
    "FAMILIES",
    "MLP",
    "Activation",
    "Experts",
    "ModelSpec",
    "NormPlacement",
    "QkNorm",
    "RopeSpec",
    "RopeType",
    "load_spec",
    "parse_rope",
    "parse_spec",
    "refuse_adapter",
    "token_ids",
]
