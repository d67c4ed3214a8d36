"""Where stages go on a cluster, what is told of its nodes, and which variables travel."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_dist.engine.placing import (
    NodeRoom,
    bundle_told,
    bundles_of_stages,
    nodes_told,
    passed_environment,
)


@pytest.mark.parametrize(
    ("nodes", "bundles"),
    [
        ("aabb", (0, 1, 2, 3)),
        ("abab", (0, 2, 1, 3)),
        ("babac", (0, 2, 1, 3, 4)),
        ("", ()),
    ],
)
def test_stages_of_one_node_are_neighbours(nodes: str, bundles: tuple[int, ...]) -> None:
    assert bundles_of_stages(list(nodes)) == bundles


@given(nodes=st.lists(st.sampled_from("abcd"), max_size=40))
def test_each_bundle_has_one_stage_and_no_node_is_visited_twice(nodes: list[str]) -> None:
    bundles = bundles_of_stages(nodes)
    assert sorted(bundles) == list(range(len(nodes)))
    way = [nodes[bundle] for bundle in bundles]
    changes = sum(a != b for a, b in pairwise(way))
    assert changes == max(0, len(set(nodes)) - 1)


def test_nodes_are_told_by_what_a_stage_would_take() -> None:
    rooms = [
        NodeRoom(address="10.0.0.2", total={"CPU": 4.0, "memory": 9.0}, free={"CPU": 0.5}),
        NodeRoom(address="10.0.0.1", total={"CPU": 8.0, "GPU": 2.0}, free={"CPU": 8.0}),
    ]
    bundle = {"CPU": 1.0, "GPU": 1.0}
    assert bundle_told(bundle) == "1 CPU and 1 GPU"
    assert nodes_told(rooms, bundle) == (
        "10.0.0.1 has 8 of 8 CPU and 0 of 2 GPU free; 10.0.0.2 has 0.5 of 4 CPU and 0 of 0 GPU free"
    )
    assert nodes_told([], bundle) == "the cluster has no node"


def test_what_is_of_one_host_stays_though_it_is_asked_for() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HOME": "/models",
        "MINE_A": "1",
        "MINED": "2",
        "EXACT": "3",
        "EXACTLY": "4",
        "CUDA_VISIBLE_DEVICES": "7",
        "RAY_AUTH_TOKEN": "secret",
    }
    asked = ("MINE_*", "EXACT", "CUDA_*", "RAY_*", "GLOO_SOCKET_IFNAME")
    names = {"NCCL_DEBUG", "HF_HOME", "MINE_A", "EXACT"}
    assert passed_environment(environment, asked) == {name: environment[name] for name in names}
