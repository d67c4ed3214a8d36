"""Stages whose attention is FlashInfer's, on GPUs that are all shapes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from orca_dist.config import AttentionBackend
from tests.fixtures.checkpoints import TINY_SIZES
from tests.fixtures.families import VARIANTS
from tests.fixtures.flash_wrapper import ShapedWrapper
from tests.fixtures.large_models import config_folder
from tests.fixtures.launches import noted_launches
from tests.fixtures.shape_run import ShapeRun, gpu_config, start

GPU_BYTES = 2 * 10**9
NUM_LAYERS = 5


class Mark:
    def synchronize(self) -> None:
        """Nothing is ever on its way."""


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[ShapedWrapper]:
    """All that stages make."""
    made: list[ShapedWrapper] = []

    class Noted(ShapedWrapper):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            made.append(self)

    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = Noted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr("orca_kernels.flash_infer.copy_mark", Mark)
    return made


def started(folder: Path, variant: str, cuda_graphs: str, num_stages: int = 1) -> ShapeRun:
    config = config_folder(folder, {**TINY_SIZES, **VARIANTS[variant], "head_dim": 64})
    chosen = {"attention_backend": AttentionBackend.FLASHINFER, "dtype": "bfloat16"}
    with noted_launches() as (kernels, _):
        settings = gpu_config(num_stages, cuda_graphs=cuda_graphs, **chosen)
        return start(config, settings, GPU_BYTES, kernels)


def test_what_a_person_chose_reaches_every_stage(
    tmp_path: Path, wrappers: list[ShapedWrapper]
) -> None:
    """No launch of the other kernel is left, and the host still reads nothing but tokens."""
    run = started(tmp_path, "llama", "off", num_stages=2)
    with noted_launches() as (_, launches):
        plans = run.serve([20, 3], [37])
    assert "attend_tiles" not in {launch.kernel for launch in launches}
    assert [len(wrapper.plans) for wrapper in wrappers] == [len(plans)] * 2
    assert run.stages[0].gpu.num_reads == 0
    assert run.stages[1].gpu.num_reads == sum(any(plan.samples) for plan in plans)


def test_layers_with_a_window_and_without_are_planned_apart(
    tmp_path: Path, wrappers: list[ShapedWrapper]
) -> None:
    run = started(tmp_path, "qwen2, upper windows", "off")
    with noted_launches():
        run.run_new([(0, 20), (64, 1)])
    assert len(wrappers) == 2
    assert {wrapper.plans[0].window_left < 0 for wrapper in wrappers} == {True, False}
    (stage,), (set_aside_bytes,) = run.stages, run.settled.activation_bytes
    assert stage.activation_bytes <= set_aside_bytes


def test_graphs_of_decodes_keep_their_own_kernel(
    tmp_path: Path, wrappers: list[ShapedWrapper]
) -> None:
    run = started(tmp_path, "llama", "on")
    with noted_launches() as (_, launches):
        run.run_new([(64, 1), (3, 1)])
        captured = [launch.kernel for launch in launches].count("attend_tiles")
        run.run_new([(0, 9), (3, 1)])
    assert captured == NUM_LAYERS
    assert [launch.kernel for launch in launches].count("attend_tiles") == NUM_LAYERS
    assert [len(wrapper.plans) for wrapper in wrappers] == [1]
