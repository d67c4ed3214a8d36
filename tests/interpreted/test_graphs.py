"""Decodes as graphs on the Triton kernels: the padded, static form against the plan's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from orca_kernels.dispatch import MIN_CAPABILITY, triton_kernels

from orca_dist.stage.worker import StageWorker
from tests.fixtures.checkpoints import loud_model
from tests.fixtures.families import VARIANTS
from tests.fixtures.graph_stage import (
    Spans,
    caches,
    checked_stage,
    graphs_of,
    new_requests,
    packed,
    scattered,
)
from tests.fixtures.thread_pipeline import BLOCK_SIZE

NUM_BLOCKS = 1000
SHORT = [(5, 1), (0, 1), (37, 1)]
SHORTER = [(0, 1), (2, 1), (19, 1)]
CUT = [(600, 1), (3, 1), (1, 1), (530, 1), (90, 1)]
CUT_ELSEWHERE = [(0, 1), (1400, 1), (700, 1), (0, 1), (511, 1)]


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> StageWorker:
    config = {**VARIANTS[request.param], "num_hidden_layers": 2, "max_position_embeddings": 2048}
    folder = loud_model(tmp_path / "loud", config)
    kernels = triton_kernels(MIN_CAPABILITY)
    return checked_stage(folder, kernels, graph_rows=8, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("stage", ["llama"], indirect=True)
def test_a_replay_has_the_bits_of_launches(stage: StageWorker) -> None:
    same_bits(stage, [SHORT, SHORTER])
    assert graphs_of(stage).sizes == [(4, 4, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["llama", "mistral, window", "qwen3"], indirect=True)
def test_so_has_one_over_contexts_that_are_cut(stage: StageWorker) -> None:
    same_bits(stage, [CUT, SHORT, CUT_ELSEWHERE, SHORTER, CUT])
    assert graphs_of(stage).sizes == [(8, 32, 8), (4, 4, 0)]


def same_bits(stage: StageWorker, batches: list[Spans]) -> None:
    """One after the other; every slot of KV but the scratch block's, too."""
    for number, spans in enumerate(batches, 1):
        blocks = scattered(spans, BLOCK_SIZE, NUM_BLOCKS, seed=number)
        batch = packed(stage, new_requests(spans, blocks, first_id=100 * number))
        x_TH = stage._decoder.embed(batch.token_ids_T)
        before = [cache.clone() for cache in caches(stage)]
        expected = stage.compute(x_TH, replace(batch, graph=None))
        launched = [cache[:NUM_BLOCKS].clone() for cache in caches(stage)]
        for cache, earlier in zip(caches(stage), before, strict=True):
            assert not torch.equal(cache, earlier)
            cache.copy_(earlier)
        assert torch.equal(stage.compute(x_TH, batch), expected)
        for cache, other in zip(caches(stage), launched, strict=True):
            assert torch.equal(cache[:NUM_BLOCKS], other)
