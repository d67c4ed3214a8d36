"""How many KV blocks stages get: as many as the fullest memory holds, or as asked if they fit."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest

from orca_dist.bootstrap import StageBootstrap
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.engine.pipeline import Pipeline
from orca_dist.engine.stages import News, OnDeath
from orca_dist.errors import StartupError
from orca_dist.proto.v1 import control_pb2 as pb
from orca_dist.versions import software_versions
from tests.unit.engine.test_settle import settled

GPU = {0: pb.Loaded(free_bytes=10_000_000, device="cuda:0", weight_bytes=77)} | {
    1: pb.Loaded(free_bytes=4_000_000, device="cuda:0", weight_bytes=99)
}
MIB = 2**20


@dataclass
class NoPlacement:
    """Nothing is ever started."""

    control_host: str = "127.0.0.1"
    replaced: list[int] = field(default_factory=list)

    def launch(self, bootstraps: Sequence[StageBootstrap], on_death: OnDeath) -> None:
        pass

    def replace(self, bootstrap: StageBootstrap, on_death: OnDeath) -> None:
        self.replaced.append(bootstrap.stage)

    def why_missing(self, stages: Collection[int]) -> str:
        return ""

    def close(self) -> None:
        pass


def test_what_a_lost_stage_said_last_is_not_taken_for_its_replacement_s_word() -> None:
    """It said that it had loaded, and died: news of its death came first."""
    placement = NoPlacement()
    pipeline = Pipeline(settled(stages=2), placement)
    for stage in (0, 1):
        pipeline._on_news((stage, pb.StageMessage(loaded=pb.Loaded(weight_bytes=stage))))
    pipeline._replace(1)
    told: list[News] = []
    pipeline.listen(told.append)
    pipeline.close()
    assert [news[0] for news in told if isinstance(news, tuple)] == [0]
    assert placement.replaced == [1]


def cpu(node_bytes: int, weight_bytes: int) -> pb.Loaded:
    return pb.Loaded(device="cpu", node_bytes=node_bytes, weight_bytes=weight_bytes)


def blocks(
    loaded: dict[int, pb.Loaded], nodes: tuple[str, ...] = ("a", "a"), **changes: object
) -> int:
    """What two stages of five layers each settle on; a block of a layer is 1000 bytes."""
    defaults = {"layer_block_bytes": 1000, "activation_bytes": (0, 0), "max_blocks": 10**9}
    config = replace(settled(device="cuda", stages=2), **(defaults | changes))  # type: ignore[arg-type]
    pipeline = Pipeline(config, LocalPlacement())
    pipeline._start.loaded.update(loaded)
    for status, node in zip(pipeline.stages, nodes, strict=True):
        status.node = node
    return pipeline._settled_blocks()


def test_the_fullest_gpu_decides() -> None:
    assert blocks(GPU, memory_share=0.5) == 2_000_000 // (1000 * 5)
    assert blocks(GPU, memory_share=0.5, activation_bytes=(0, 2_000_000)) == 1_000_000 // 5000


def test_no_more_than_can_be_used() -> None:
    assert blocks(GPU, max_blocks=7) == 7


def test_stages_of_a_node_share_its_ram() -> None:
    """What is left of 10 MB is 4; both stages' layers come out of a half of it."""
    loaded = {stage: cpu(10_000_000, 2_500_000) for stage in range(2)}
    changes = {"memory_share": 0.5, "activation_bytes": (400_000, 600_000)}
    assert blocks(loaded, **changes) == 4_000_000 // 2 // (2 * 5000)


def test_the_fullest_node_decides() -> None:
    """Each has one stage: 10 MB less 3, and 8 less 3."""
    loaded = {0: cpu(10_000_000, 3_000_000), 1: cpu(8_000_000, 3_000_000)}
    assert blocks(loaded, ("a", "b"), memory_share=1.0) == 5_000_000 // 5000


def test_no_room_is_refused_with_the_sum_of_each_stage() -> None:
    loaded = {stage: cpu(100 * MIB, 49 * MIB) for stage in range(2)}
    with pytest.raises(StartupError) as caught:
        blocks(loaded, activation_bytes=(MIB, MIB), memory_share=0.25)
    told = "0.05 GiB weights + 0.00 GiB activations + 0.00 GiB KV"
    assert f"stage 0: {told}, stage 1: {told}; node a has 0.10 GiB" in str(caught.value)
    assert "memory_share = 0.25 of what is left holds no KV block" in str(caught.value)


def test_what_is_asked_for_must_fit() -> None:
    """2 x 1000 blocks of 5000 bytes beside 2 x 1 MB."""
    loaded = {stage: cpu(12_000_000, 1_000_000) for stage in range(2)}
    assert blocks(loaded, num_blocks=1000) == 1000
    with pytest.raises(StartupError, match=r"kv_tokens = 16016 do not fit: stage 0: .*stage 1: "):
        blocks(loaded, num_blocks=1001)
    assert blocks(loaded, ("a", "b"), num_blocks=1001) == 1001


def test_a_gpu_with_nothing_left_is_refused() -> None:
    full = GPU | {1: pb.Loaded(free_bytes=0, weight_bytes=99, device="cuda:0")}
    with pytest.raises(StartupError, match=r"cuda:0 of stage 1 has"):
        blocks(full, memory_share=0.9)


# ---- versions and GPUs of the nodes ------------------------------------


def hello(versions: str, gpus: tuple[str, ...] = ()) -> pb.StageMessage:
    return pb.StageMessage(hello=pb.Hello(pid=7, host="10.0.0.2", versions=versions, gpus=gpus))


def test_a_stage_of_other_versions_is_refused() -> None:
    """Ray compares its own and Python's, and knows nothing of torch."""
    ours = software_versions()
    theirs = ours.replace("torch ", "torch 9.")
    pipeline = Pipeline(settled(stages=2), NoPlacement())
    pipeline._note((0, hello(ours)))
    with pytest.raises(StartupError) as caught:
        pipeline._note((1, hello(theirs)))
    pipeline.close()
    assert str(caught.value) == (
        f"stage 1 (pid 7, node 10.0.0.2) runs {theirs}, and the engine master {ours}: install the "
        "same on every node"
    )


def test_what_may_differ_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cu130", "ray": "2.60.0"}
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.7")
    assert software_versions().startswith("python 3.12, torch 2.13.0, ray 2.60.0, orca_dist ")


@pytest.mark.parametrize(("gpus", "told"), [((), "cuda:0"), (("5",), "cuda:0 (GPU 5)")])
def test_a_device_is_told_with_the_node_s_number_of_it(gpus: tuple[str, ...], told: str) -> None:
    pipeline = Pipeline(settled(stages=2), NoPlacement())
    pipeline._note((1, hello(software_versions(), gpus)))
    pipeline._note((1, pb.StageMessage(loaded=pb.Loaded(device="cuda:0"))))
    pipeline.close()
    assert pipeline.stages[1].device == told


class Homeless(NoPlacement):
    def why_missing(self, stages: Collection[int]) -> str:
        return f"no node for {stages}"


def test_what_keeps_stages_away_is_told() -> None:
    pipeline = Pipeline(replace(settled(stages=2), start_timeout_s=0.01), Homeless())
    with pytest.raises(StartupError, match=r"did not start within .*: no node for \[0, 1\]"):
        pipeline.start(lambda text: None, lambda done, total: None)
    pipeline.close()
