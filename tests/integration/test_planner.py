"""The search for a configuration, by simulation: who wins, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orca_dist.core import Batching, Forming
from orca_dist.sim.layouts import Target
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.planner import Candidate, Found, search
from tests.fixtures.made_up_cluster import DEMAND, DEVICE, ROOMY, WHOLE_S, layout, target

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
