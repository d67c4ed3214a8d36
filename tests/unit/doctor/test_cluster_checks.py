"""Verdicts on nodes together, and on the ways between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orca_dist.doctor.cluster_checks import (
    check_clocks,
    check_links,
    check_memory,
    check_places,
    check_ray,
    check_versions,
)
from orca_dist.doctor.facts import Demand, GpuFacts, MemoryFacts, NodeFacts, RayPort, Room
from orca_dist.doctor.verdicts import Check, Finding, Verdict, worst
from tests.fixtures.doctored import DEMAND, GIB, HEALTHY, LINK, NEED, VERSIONS, gpu

OTHER = replace(HEALTHY, node="10.0.0.2", hostname="two")


def only(findings: object) -> Finding:
    (finding,) = findings  # type: ignore[misc]
    return finding


def with_memory(*gibs: int) -> list[NodeFacts]:
    return [
        replace(
            HEALTHY,
            memory=MemoryFacts(limit_bytes=gib * GIB, available_bytes=gib * GIB, is_limited=True),
        )
        for gib in gibs
    ]


# ---- versions ----------------------------------------------------------


def test_the_same_everywhere() -> None:
    finding = only(check_versions([HEALTHY, OTHER]))
    assert finding.verdict is Verdict.PASS
    assert finding.seen.endswith("on all 2 nodes")


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("python", "3.11.9", Verdict.WARN),
        ("python", "3.12.1", Verdict.FAIL),
        ("torch", "2.12.0", Verdict.FAIL),
        ("torch", "2.13.0+cu130", Verdict.WARN),
        ("ray", "", Verdict.FAIL),
        ("orca_dist", "0.0.9", Verdict.FAIL),
    ],
)
def test_one_that_differs_is_named_with_its_nodes(
    name: str, version: str, verdict: Verdict
) -> None:
    odd = replace(OTHER, versions=VERSIONS | {name: version})
    first, rest = check_versions([HEALTHY, odd])
    assert first.verdict is verdict
    assert first.seen == f"{name} {VERSIONS[name]} on 10.0.0.1; {name} {version or '-'} on 10.0.0.2"
    assert rest.verdict is Verdict.PASS
    assert f"{name} " not in rest.seen


# ---- places ------------------------------------------------------------


def room(num_cpus: float, num_gpus: float = 0) -> Room:
    return Room(node="10.0.0.1", num_cpus=num_cpus, num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("rooms", "demand", "verdict"),
    [
        ([room(2), room(2)], DEMAND, Verdict.PASS),
        ([room(3), room(1)], DEMAND, Verdict.FAIL),  # four CPUs, and one place
        ([room(0), room(4)], DEMAND, Verdict.PASS),
        ([room(4, 1)], replace(DEMAND, on_gpu=True), Verdict.FAIL),
        ([room(4, 2)], replace(DEMAND, on_gpu=True), Verdict.PASS),
        ([room(1)], replace(DEMAND, num_stages=3, num_cpus=1 / 3), Verdict.PASS),
    ],
)
def test_places(rooms: list[Room], demand: Demand, verdict: Verdict) -> None:
    assert only(check_places(rooms, demand)).verdict is verdict


def test_places_are_counted_in_words() -> None:
    finding = only(check_places([room(0), room(3, 8)], replace(DEMAND, on_gpu=True)))
    assert finding.seen == "2 stages of 2 CPUs and a GPU; Ray has 1 such place on 1 of 2 nodes"
    assert "--cpus-per-stage" in finding.remedy


# ---- memory ------------------------------------------------------------


@pytest.mark.parametrize(
    ("gibs", "verdict"),
    [
        ([8], Verdict.PASS),
        ([4, 4], Verdict.PASS),  # one stage each
        ([6], Verdict.FAIL),  # 7 in all
        ([3, 3, 3], Verdict.FAIL),  # none takes the larger stage
        ([7], Verdict.WARN),  # nothing is left for a request
    ],
)
def test_stages_in_the_memory_of_nodes(gibs: Sequence[int], verdict: Verdict) -> None:
    assert worst(list(check_memory(with_memory(*gibs), NEED))) is verdict


def test_kv_room_is_told_in_tokens() -> None:
    tight = replace(NEED, max_model_len=1000)
    finding = only(check_memory(with_memory(8), tight))
    assert finding.verdict is Verdict.WARN
    assert "room for 512 KV tokens, a request may have 1000" in finding.seen


def test_memory_that_is_in_use() -> None:
    facts = replace(
        HEALTHY,
        memory=MemoryFacts(limit_bytes=8 * GIB, available_bytes=GIB, is_limited=True),
    )
    fits, held = check_memory([facts], NEED)
    assert fits.verdict is Verdict.PASS
    assert held.verdict is Verdict.WARN
    assert held.seen == "1.0 GiB of 8.0 GiB of the container or job free, a stage needs 4.0 GiB"


@pytest.mark.parametrize(
    ("gibs", "verdict"),
    [([80], Verdict.FAIL), ([80, 80], Verdict.PASS), ([80, 2, 2], Verdict.FAIL)],
)
def test_a_stage_takes_a_gpu(gibs: Sequence[int], verdict: Verdict) -> None:
    """However large it is."""
    gpus = GpuFacts(gpus=tuple(gpu(i, gib) for i, gib in enumerate(gibs)), driver="1")
    findings = list(check_memory([replace(HEALTHY, gpus=gpus)], replace(NEED, on_gpu=True)))
    assert worst(findings) is verdict


def test_gpus_are_counted_over_all_nodes() -> None:
    gpus = GpuFacts(gpus=(gpu(),), driver="1")
    nodes = [replace(HEALTHY, gpus=gpus), replace(OTHER, gpus=gpus)]
    on_gpus = replace(NEED, on_gpu=True)
    assert worst(list(check_memory(nodes, on_gpus))) is Verdict.PASS
    finding = only(check_memory(nodes[:1], on_gpus))
    assert finding.check is Check.GPUS
    assert finding.seen == "2 stages need as many GPUs, 1 GPU found"


# ---- ways between nodes ------------------------------------------------


def test_good_links_are_one_finding() -> None:
    back = replace(LINK, source="10.0.0.2", target="10.0.0.1", latency_s=2e-4, bytes_s=5e8)
    finding = only(check_links([LINK, back], NEED))
    assert finding.seen == (
        "2 ways: 0.1 ms to 0.2 ms there and back, 1 GB/s to 500 MB/s; "
        "2048 tokens' activations take 20 ms"
    )


def test_a_link_that_is_not_there() -> None:
    cut = replace(LINK, problem="10.0.0.2:4000: timed out")
    finding = only(check_links([cut], None))
    assert finding.verdict is Verdict.FAIL
    assert finding.seen == "10.0.0.1 does not reach 10.0.0.2: 10.0.0.2:4000: timed out"


@pytest.mark.parametrize("slow", [{"latency_s": 0.02}, {"bytes_s": 11e6}])
def test_a_slow_link(slow: dict[str, float]) -> None:
    finding = only(check_links([replace(LINK, **slow)], None))
    assert finding.verdict is Verdict.WARN
    assert finding.seen.startswith("10.0.0.1 to 10.0.0.2: ")


@pytest.mark.parametrize(
    ("offset_s", "error_s", "verdict"),
    [
        (0.01, 0.001, Verdict.PASS),
        (-0.5, 0.001, Verdict.WARN),
        (0.5, 0.45, Verdict.PASS),  # a slow link knows no better
        (-70.0, 0.001, Verdict.FAIL),
    ],
)
def test_clocks(offset_s: float, error_s: float, verdict: Verdict) -> None:
    finding = only(check_clocks([replace(LINK, offset_s=offset_s, error_s=error_s)]))
    assert finding.verdict is verdict


def test_which_clock_is_behind() -> None:
    finding = only(check_clocks([replace(LINK, offset_s=-2.0)]))
    assert finding.seen == "10.0.0.2 is 2 s behind 10.0.0.1"


def test_a_node_has_no_clock_beside_its_own() -> None:
    assert list(check_clocks([replace(LINK, target=LINK.source, offset_s=5.0)])) == []


# ---- Ray ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "is_open", "verdict"),
    [
        ("10.0.0.1:6379", True, Verdict.FAIL),
        ("10.0.0.1:6379", False, Verdict.PASS),
        ("10.0.0.1:6379", None, Verdict.WARN),
        ("127.0.0.1:6379", True, Verdict.WARN),
        ("[::1]:6379", True, Verdict.WARN),
        ("[::]:6379", True, Verdict.FAIL),
    ],
)
def test_a_head_that_needs_no_token(address: str, is_open: bool | None, verdict: Verdict) -> None:
    head = RayPort(address=address, open=is_open)
    assert only(check_ray(head, [HEALTHY])).verdict is verdict
    alone = replace(HEALTHY, ray_ports=(head,))
    assert only(check_ray(None, [alone])).verdict is verdict


def test_the_clusters_head_is_told_once_and_others_too() -> None:
    head = RayPort(address="10.0.0.1:6379", open=True)
    own = RayPort(address="[::]:6379", open=True)
    neighbour = RayPort(address="[::]:6380", open=True)
    nodes = [replace(HEALTHY, ray_ports=(own, neighbour)), OTHER]
    told = [(finding.seen.split()[0], finding.node) for finding in check_ray(head, nodes)]
    assert told == [("10.0.0.1:6379", ""), ("[::]:6380", "10.0.0.1")]


def test_no_ray_at_all() -> None:
    assert only(check_ray(None, [HEALTHY])).verdict is Verdict.PASS
