"""Stages on a Ray cluster of several nodes, which somebody else started: placed, equipped, told of.

Stages compute on CPUs here; the GPUs are numbers that the nodes give to Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray._private import state as ray_state

from orca_dist.bootstrap import StageBootstrap
from orca_dist.config import LogConfig
from orca_dist.engine.engine import Engine
from orca_dist.engine.ray_pipeline import RayConfig, RayPlacement
from orca_dist.engine.stages import StageStatus
from orca_dist.errors import StartupError
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import live, local_config
from tests.fixtures.ray_nodes import RayNodes, join_as_driver, ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

FIRST, SECOND, LATE = "127.0.0.2", "127.0.0.3", "127.0.0.4"
LATE_BY_S = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """A head with two GPUs, whose numbers somebody has turned round, and a node with one."""
    gpus = {"CUDA_VISIBLE_DEVICES": "5,3"}
    with ray_nodes(FIRST, "--num-cpus", "2", "--num-gpus", "2", variables=gpus) as nodes:
        nodes.start(SECOND, "--num-cpus", "1", "--num-gpus", "1")
        yield nodes


@pytest.fixture(autouse=True)
def driver(cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    join_as_driver(cluster, monkeypatch)


def placement(cluster: RayNodes, num_stages: int, **changes: object) -> RayPlacement:
    settings: dict[str, object] = {"num_cpus": 1, "num_gpus": 1, "place_timeout_s": 60}
    return RayPlacement(
        RayConfig(address=cluster.address, num_stages=num_stages, **(settings | changes))  # type: ignore[arg-type]
    )


def started(folder: Path, where: RayPlacement, num_stages: int) -> list[StageStatus]:
    """The stages of a pipeline that has answered."""
    with live(folder, local_config(num_stages), placement=where) as front:
        (answer,) = front.generate([[5, 9, 17]], 4)
        assert len(answer.tokens) == 4
        return list(front.engine.info().stages)


def test_each_stage_has_a_gpu_of_its_own_and_neighbours_share_a_node(
    cluster: RayNodes, folder: Path
) -> None:
    stages = started(folder, placement(cluster, 3), 3)
    first = [(FIRST, "cpu (GPU 5)"), (FIRST, "cpu (GPU 3)")]
    second = [(SECOND, "cpu (GPU 0)")]
    places = [(stage.node, stage.device) for stage in stages]
    assert places in (first + second, second + first)


class Greedy(RayPlacement):
    """Stages that look for one GPU more than Ray was asked for."""

    def _equipped(self, bootstrap: StageBootstrap) -> StageBootstrap:
        return replace(super()._equipped(bootstrap), num_gpus=2)


def test_a_stage_with_too_few_gpus_does_not_start(cluster: RayNodes, folder: Path) -> None:
    config = RayConfig(
        address=cluster.address, num_cpus=1, num_gpus=1, num_stages=1, place_timeout_s=60
    )
    own = rf"({FIRST} Ray gave stage 0 the GPUs \[[35]\]|{SECOND} Ray gave stage 0 the GPUs \[0\])"
    told = rf"did not start: on node {own}, and it is to have 2 of its own$"
    with pytest.raises(StartupError, match=told):
        started(folder, Greedy(config), 1)


def test_no_room_is_told_by_node_and_leaves_nothing_behind(cluster: RayNodes, folder: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(StartupError) as caught:
        started(folder, placement(cluster, 4, num_cpus=0.5, place_timeout_s=3), 4)
    assert 3 <= time.monotonic() - began_s < 8
    assert str(caught.value) == (
        "Ray could not place 4 stages with 0.5 CPU and 1 GPU each within start_timeout_s = 3 s: "
        f"{FIRST} has 2 of 2 CPU and 2 of 2 GPU free; {SECOND} has 1 of 1 CPU and 1 of 1 GPU free; "
        "add or free nodes, take fewer stages, lower cpus_per_stage, or raise start_timeout_s"
    )
    with connected(cluster):
        groups = ray.util.placement_group_table().values()
        actors = ray_state.actors().values()
    assert {group["state"] for group in groups} == {"REMOVED"}
    assert {actor["State"] for actor in actors} <= {"DEAD"}


@pytest.mark.slow
def test_a_node_that_comes_late_is_used(cluster: RayNodes, folder: Path) -> None:
    late = threading.Timer(LATE_BY_S, lambda: cluster.start(LATE, *["--num-gpus", "1"]))
    late.start()
    stages = started(folder, placement(cluster, 4, num_cpus=0.5), 4)
    late.join()
    assert {stage.node for stage in stages} == {FIRST, SECOND, LATE}


def test_listed_variables_travel_and_those_of_one_host_stay(
    cluster: RayNodes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the driver's GLOO_SOCKET_IFNAME no stage would start."""
    for name in ("NCCL_DEBUG", "HF_HOME", "MINE_ONE", "OTHER", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "the-driver-s-0")
    config = local_config(
        2, launcher="ray", ray_address=cluster.address, pass_env=("MINE_*", "GLOO_SOCKET_*")
    )
    Engine.start(folder, config, log_config=LogConfig()).close()
    logs = Path(cluster.folder, "session_latest", "logs").glob("worker-*.err")
    told = [line for log in logs for line in log.read_text().splitlines() if "driver's: " in line]
    names = {line.partition("driver's: ")[2] for line in told}
    assert len(told) == 2
    assert [name.split() for name in names] == [["HF_HOME", "MINE_ONE", "NCCL_DEBUG"]]


@contextmanager
def connected(cluster: RayNodes) -> Iterator[None]:
    """This process as a driver of its own, for looking at the cluster."""
    ray.init(address=cluster.address, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
