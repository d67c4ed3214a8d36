"""Tensors of a checkpoint that are read when they are asked for."""

from __future__ import annotations

import torch

from orca_dist.weights.lazy import LazyTensors


def test_each_is_read_when_asked_for_and_a_shared_one_once() -> None:
    read: list[str] = []

    def make(name: str) -> torch.Tensor:
        read.append(name)
        return torch.ones(1)

    tensors = LazyTensors({"embed": "E", "lm_head": "E", "norm": "N"}, make)
    assert (list(tensors), len(tensors)) == (["embed", "lm_head", "norm"], 3)
    assert ("norm" in tensors, "q_norm" in tensors) == (True, False)
    assert tensors.get("q_norm") is None
    assert not read
    assert tensors["lm_head"] is tensors["embed"]
    assert tensors["norm"] is not None
    assert read == ["E", "N"]
