"""The search for a configuration: what fits by hand, who wins, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orca_dist.core import Batching, Forming, Plan
from orca_dist.sim.hardware import Device
from orca_dist.sim.layouts import Cluster, Layout, Target
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.planner import Candidate, Demand, Found, search
from orca_dist.sim.shapes import ModelShape

# 8 layers of 2 GB, an embedding and a head of 1 GB each, 4000 bytes a slot and layer.
SHAPE = ModelShape(
    num_layers=8,
    hidden_size=1000,
    num_heads=10,
    num_kv_heads=10,
    head_dim=100,
    intermediate_size=498_000,
    vocab_size=500_000,
    gated=False,
)
# 9 GB for weights and KV; a layer's weights take 2 ms to read.
DEVICE = Device(
    name="made-up",
    flop_s=1e18,
    memory_bytes_s=1e12,
    memory_bytes=10e9,
    nvlink_bytes_s=200e9,
    pcie_bytes_s=0,
)
ROOMY = replace(DEVICE, memory_bytes=1e12)
WHOLE_S = 17e-3  # an iteration of all layers and the head
DEMAND = Demand(
    rate=1.0,
    slo_s=1.0,
    prompt_lens=Lengths(low=20, high=20),
    output_lens=Lengths(low=10, high=10),
    num_requests=40,
)


def target(num_nodes: int, per_node: int, device: Device = DEVICE, longest: int = 30) -> Target:
    cluster = Cluster(
        device=device, num_nodes=num_nodes, devices_per_node=per_node, network_bytes_s=1e9
    )
    return Target(shape=SHAPE, cluster=cluster, longest=longest)


def layout(num_stages: int, tensor_parallel: int = 1) -> Layout:
    return Layout(num_stages=num_stages, tensor_parallel=tensor_parallel)


def layouts_of(found: Found) -> set[tuple[int, int]]:
    return {(each.layout.num_stages, each.layout.tensor_parallel) for each in found.candidates}


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


# ---- who wins ----------------------------------------------------------


def alone(candidates: Found, num_stages: int, tensor_parallel: int = 1) -> list[Candidate]:
    at = layout(num_stages, tensor_parallel)
    return [each for each in candidates.candidates if each.layout == at]


def test_the_fewest_devices_win_where_all_do() -> None:
    found = search(target(1, 4, ROOMY), DEMAND)
    counts = [each.layout.num_devices for each in found.candidates if each.servable]
    assert all(each.meets_slo and each.keeps_up for each in found.candidates)
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert found.candidates[0].latency_s == pytest.approx(WHOLE_S, rel=0.05)


def test_a_faster_one_on_more_devices_is_no_better() -> None:
    found = search(target(1, 2, ROOMY), DEMAND, sharded_too=True)
    assert found.candidates[0].layout == layout(1)
    assert alone(found, 1, 2)[0].latency_s < 0.6 * found.candidates[0].latency_s


def test_more_stages_win_where_one_can_not_keep_up() -> None:
    """A request at a time takes 10 iterations; three halves of that rate come in."""
    busy = replace(DEMAND, rate=1.5 / (10 * WHOLE_S), slo_s=2.5 * WHOLE_S, num_requests=120)
    found = search(target(1, 2, ROOMY), busy, (1,))
    best = found.candidates[0]
    assert (best.layout, best.meets_slo, best.keeps_up) == (layout(2), True, True)
    (single,) = [each for each in alone(found, 1) if each.schedule.batching is Batching.ITERATION]
    assert not single.meets_slo
    assert single.reason.startswith("SLO missed by ")
    assert "batches are full at 1" in single.reason


def test_sharded_stages_come_last_unless_they_are_wanted() -> None:
    """Only two devices a stage are fast enough, and serve can't run them."""
    fast = replace(DEMAND, slo_s=0.6 * WHOLE_S)
    served = search(target(1, 2, ROOMY), fast)
    ranks = [each.servable for each in served.candidates]
    assert ranks == sorted(ranks, reverse=True)
    assert not served.candidates[0].meets_slo
    first = search(target(1, 2, ROOMY), fast, sharded_too=True).candidates[0]
    assert (first.layout, first.meets_slo, first.servable) == (layout(1, 2), True, False)


def test_who_misses_ranks_by_latency() -> None:
    found = search(target(1, 4, ROOMY), replace(DEMAND, slo_s=1e-6))
    latencies = [each.latency_s for each in found.candidates if each.servable]
    assert latencies == sorted(latencies)
    assert not any(each.meets_slo for each in found.candidates)


def test_who_falls_behind_is_no_winner() -> None:
    """So lenient a bound that a queue which only grows still meets it."""
    flood = replace(DEMAND, rate=1000.0, slo_s=1000.0)
    best = search(target(1, 1, ROOMY), flood, (1,)).candidates[0]
    assert (best.meets_slo, best.keeps_up) == (True, False)
    assert f"falls behind: {best.num_behind} of 40 out" in best.reason


# ---- what is not simulated ---------------------------------------------


def test_larger_batches_are_left_out_where_they_change_nothing() -> None:
    found = search(target(1, 2, ROOMY), DEMAND, (32, 8, 128))
    continuous = [c for c in found.candidates if c.schedule.batching is Batching.ITERATION]
    assert {each.schedule.max_batch_size for each in continuous} == {8}
    for small in continuous:
        large = search(target(1, 2, ROOMY), DEMAND, (128,)).candidates
        same = [
            each.report
            for each in large
            if each.layout == small.layout
            and each.schedule.batching is Batching.ITERATION
            and each.schedule.forming is small.schedule.forming
        ]
        assert [replace(each, slot_utilization=0) for each in same] == [
            replace(small.report, slot_utilization=0)
        ]


def test_larger_batches_are_tried_where_the_smaller_are_full() -> None:
    found = search(target(1, 1, ROOMY), replace(DEMAND, rate=100.0), (1, 2, 4))
    continuous = [c for c in found.candidates if c.schedule.batching is Batching.ITERATION]
    assert [each.schedule.max_batch_size for each in continuous] == [4, 2, 1]  # by latency


def test_smaller_ones_are_not_tried_under_request_batching_where_the_larger_fails() -> None:
    flood = replace(DEMAND, rate=1000.0, slo_s=1e-3)
    for demand, sizes in ((DEMAND, [8, 4]), (flood, [8])):
        found = search(target(1, 1, ROOMY), demand, (4, 8))
        batches = [c.schedule for c in found.candidates if c.schedule.batching is Batching.REQUEST]
        assert sorted((each.max_batch_size for each in batches), reverse=True) == sizes


def test_one_stage_has_no_forming_to_choose() -> None:
    found = search(target(1, 2, ROOMY), DEMAND, (4,))
    formings = {num: {each.schedule.forming for each in alone(found, num)} for num in (1, 2)}
    assert formings == {1: {Forming.BALANCED}, 2: {Forming.BALANCED, Forming.PAPER}}


# ---- reasons -----------------------------------------------------------


def test_reasons_name_what_binds() -> None:
    reasons = [each.reason for each in search(target(1, 8, ROOMY), DEMAND).candidates]
    assert all("of the time is matmul" in reason for reason in reasons)
    assert any("stages idle up to 9" in reason for reason in reasons)


def test_a_slow_network_is_named() -> None:
    slow = target(2, 1, ROOMY)
    slow = replace(slow, cluster=replace(slow.cluster, network_bytes_s=1e5))
    found = search(slow, DEMAND, (8,))
    assert all("of the time is link" in each.reason for each in alone(found, 2))
    assert all("of the time is matmul" in each.reason for each in alone(found, 1))


def tight(num_slots: int) -> Target:
    """One stage with so many slots beside its weights."""
    room = (18e9 + num_slots * 8 * 4000) / 0.9
    return target(1, 1, replace(DEVICE, memory_bytes=room))


def test_preemptions_are_named() -> None:
    """Prompts take a block each, and then grow to two."""
    grow = replace(DEMAND, rate=50.0, prompt_lens=Lengths(low=14, high=14))
    best = search(tight(80), grow, (8,)).candidates[0]
    assert best.report.preemptions > 0
    assert f"memory: {best.report.preemptions} preemptions with 80 KV slots" in best.reason


def test_requests_that_wait_for_memory_are_named() -> None:
    """Two blocks each, of three."""
    best = search(tight(60), replace(DEMAND, rate=50.0), (8,)).candidates[0]
    assert best.report.preemptions == 0
    assert "memory: requests wait, 1 fill 60 KV slots" in best.reason


def test_progress_ends_complete() -> None:
    seen: list[tuple[int, int]] = []
    search(target(1, 1, ROOMY), DEMAND, on_progress=lambda *at: seen.append(at))
    assert seen[0] == (0, 6)
    assert seen[-1] == (6, 6)
