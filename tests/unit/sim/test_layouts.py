"""What fits on which devices, by hand, and over which links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orca_dist.core import Plan
from orca_dist.sim.planner import search
from tests.fixtures.made_up_cluster import DEMAND, DEVICE, SHAPE, layout, target

# ---- what fits ---------------------------------------------------------


def test_a_model_fits_from_three_devices_on() -> None:
    """On two, 4 layers and an end take all 9 GB, and the longest request has no slot."""
    two = target(1, 2)
    misfit = two.misfit(layout(2))
    assert misfit is not None
    assert (misfit.needed_bytes, misfit.room_bytes) == (9e9 + 32 * 4 * 4000, 9e9)
    assert two.misfit(layout(3)) is None
    assert two.smallest() == layout(3)
    assert search(two, DEMAND).candidates == ()
    assert len(search(two, DEMAND).misfits) == 3  # 1 and 2 stages, 1 stage of two devices
    assert search(target(1, 3), DEMAND, (4,)).candidates[0].layout == layout(3)


def test_slots_count_in_whole_blocks() -> None:
    """Three stages leave the first 2 GB, 166666 slots: 10416 blocks of 16."""
    assert target(1, 3, longest=166_656).misfit(layout(3)) is None
    assert target(1, 3, longest=166_657).misfit(layout(3)) is not None
    found = search(target(1, 3), DEMAND, (4,))
    assert {each.kv_tokens for each in found.candidates if each.layout == layout(3)} == {166_666}


def test_two_shards_may_do_with_fewer_devices_than_two_stages() -> None:
    """An odd layer more: 3 layers of 2 GB in 4.5 GB of room are 3 stages, or 1 of 2 devices."""
    shape = replace(SHAPE, num_layers=3, vocab_size=1)
    small = replace(target(1, 2), shape=shape)
    small = replace(small, cluster=replace(small.cluster, device=replace(DEVICE, memory_bytes=4e9)))
    assert small.fewest_stages(1) == 3
    assert small.smallest() == layout(1, 2)


def test_a_layer_that_no_device_holds_fits_nowhere() -> None:
    tiny = replace(DEVICE, memory_bytes=1e9)
    assert target(4, 2, tiny).smallest() is None


def test_shards_divide_nodes_and_heads_evenly() -> None:
    assert target(1, 8).shards() == [1, 2]  # 4 and 8 don't divide 10 heads
    assert target(1, 5).shards() == [1, 5]
    assert target(1, 3).shards() == [1]


def test_stages_are_powers_of_two_the_most_and_the_fewest_that_fit() -> None:
    found = {(each.num_stages, each.tensor_parallel) for each in target(2, 3).layouts()}
    assert found == {(1, 1), (2, 1), (3, 1), (4, 1), (6, 1)}
    sharded = {each.num_stages for each in target(2, 6).layouts() if each.tensor_parallel == 2}
    assert sharded == {1, 2, 4, 6}


def test_memory_adds_up_to_the_model_and_its_kv() -> None:
    for candidate in search(target(2, 2), DEMAND, (4,)).candidates:
        stages = candidate.stages
        assert sum(stage.num_layers for stage in stages) == 8
        assert sum(stage.weights_bytes for stage in stages) == 18_000_000_000
        assert sum(stage.kv_bytes for stage in stages) == candidate.kv_tokens * 8 * 4000
        for stage in stages:
            assert stage.weights_bytes + stage.kv_bytes <= stage.room_bytes
            assert stage.room_bytes == 9e9 * candidate.layout.tensor_parallel
        fullest = min(s.room_bytes - s.weights_bytes - s.kv_bytes for s in stages)
        assert fullest < 8 * 4000  # not even a slot more


# ---- links -------------------------------------------------------------


def test_only_the_link_between_nodes_is_the_networks() -> None:
    pair = target(2, 2)
    assert [pair.node(layout(4), stage) for stage in range(4)] == [0, 0, 1, 1]
    assert [pair.node(layout(2, 2), stage) for stage in range(2)] == [0, 1]
    plan = Plan(seq=0)
    plan.add(0, 0, 50, True)
    nvlink_s, network_s = 50 * 2000 / 100e9, 50 * 2000 / 1e9
    times = pair.cost(layout(4)).times(plan)
    assert times.links_s == pytest.approx([nvlink_s, network_s, nvlink_s, nvlink_s])
