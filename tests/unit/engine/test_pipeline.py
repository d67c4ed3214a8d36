"""How many KV blocks stages with memory of their own get: as many as the fullest one holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.engine.pipeline import Pipeline
from orca_dist.errors import StartupError
from orca_dist.proto.v1 import control_pb2 as pb
from tests.unit.engine.test_settle import settled

FREE_BYTES = {0: 10_000_000, 1: 4_000_000}


def _pipeline(free_bytes: dict[int, int], **changes: object) -> Pipeline:
    config = replace(settled(device="cuda", launcher="local", stages=2), **changes)  # type: ignore[arg-type]
    assert config.num_blocks is None
    pipeline = Pipeline(config, LocalPlacement())
    for stage, free in free_bytes.items():
        pipeline._start.loaded[stage] = pb.Loaded(free_bytes=free)
    return pipeline


def test_the_fullest_stage_decides() -> None:
    pipeline = _pipeline(FREE_BYTES, layer_block_bytes=1000, gpu_memory_share=0.5)
    num_layers = len(pipeline.config.layers[1])
    assert pipeline._affordable_blocks() == 2_000_000 // (1000 * num_layers)


def test_no_more_than_can_be_used() -> None:
    assert _pipeline(FREE_BYTES, layer_block_bytes=1, max_blocks=7)._affordable_blocks() == 7


def test_no_room_is_refused_by_stage() -> None:
    pipeline = _pipeline(FREE_BYTES | {1: 2**20}, layer_block_bytes=2**20)
    with pytest.raises(StartupError, match=r"stage 1 .* has 1 MiB free beside its weights"):
        pipeline._affordable_blocks()
