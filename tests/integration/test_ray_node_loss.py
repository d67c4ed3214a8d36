"""A node of a Ray cluster is lost, and the stage on it: its bundle goes to another node, and every
answer is what it would have been. (Without another node: test_ray_hosts.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orca_dist.core import FinishReason, Sampling
from orca_dist.engine.stages import StageStatus
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Answer, Front, live, local_config
from tests.fixtures.ray_nodes import RayNode, RayNodes, join_as_driver, ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(480)]

HEAD, OTHERS = "127.0.0.2", ("127.0.0.3", "127.0.0.4", "127.0.0.5")  # one of these is spare
STAGES = 3
NUM_TOKENS = 1500  # takes longer than a raylet's stage outlives it
PROMPTS = [[5, 9, 17], [300], list(range(40, 90)), [7, 7]]
KV_TOKENS = 8192
RECOVERY_S = 150.0
GONE_WITHIN_S = 15.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"), max_model_len=2048)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The answers without any fault."""
    with live(folder, local_config(1, kv_tokens=KV_TOKENS)) as front:
        return [answer.tokens for answer in front.wait(submit_all(front))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """Four nodes with a CPU each; the driver is on the first."""
    with ray_nodes(HEAD, "--num-cpus", "1") as nodes:
        nodes.join(*OTHERS)
        yield nodes


def test_the_stage_of_a_lost_node_goes_on_elsewhere(
    cluster: RayNodes, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    join_as_driver(cluster, monkeypatch)
    config = local_config(
        STAGES,
        launcher="ray",
        ray_address=cluster.address,
        recovery_timeout_s=RECOVERY_S,
        kv_tokens=KV_TOKENS,
    )
    with live(folder, config) as front:
        before = front.engine.info().stages
        assert len({stage.node for stage in before}) == STAGES
        victim = away_from_the_driver(before)
        running = submit_all(front)
        front.wait(running, num_tokens=2)
        node_of(cluster, victim).raylet().kill()
        assert tokens_of(front.wait(running, within_s=RECOVERY_S)) == expected

        after = front.engine.info().stages
        for old, new in zip(before, after, strict=True):
            kept = old.index != victim.index
            assert ((old.pid, old.node) == (new.pid, new.node)) == kept
        used = {stage.node for stage in before}
        assert {after[victim.index].node} == {HEAD, *OTHERS} - used
        assert psutil.wait_procs(processes_of([victim]), GONE_WITHIN_S)[1] == []


def away_from_the_driver(stages: tuple[StageStatus, ...]) -> StageStatus:
    return next(stage for stage in stages if stage.node != HEAD)


def node_of(cluster: RayNodes, stage: StageStatus) -> RayNode:
    return next(node for node in cluster.nodes if node.ip == stage.node)


def processes_of(stages: list[StageStatus]) -> list[psutil.Process]:
    return [psutil.Process(stage.pid) for stage in stages if psutil.pid_exists(stage.pid)]


def submit_all(front: Front) -> list[int]:
    """Greedy and seeded ones take turns."""
    kinds = (Sampling(temperature=1.0, seed=i) if i % 2 else Sampling() for i in range(4))
    return [front.submit(*each) for each in zip(PROMPTS, [NUM_TOKENS] * 4, kinds, strict=True)]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    assert {answer.reason for answer in answers} == {FinishReason.LENGTH}
    return [answer.tokens for answer in answers]
