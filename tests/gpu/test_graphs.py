"""Decodes as CUDA graphs: a replay against the same kernels launched one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orca_dist.spec import load_spec
from orca_dist.stage.worker import StageWorker
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.graph_stage import (
    Spans,
    begin,
    caches,
    graphs_of,
    new_requests,
    packed,
    scattered,
)
from tests.fixtures.thread_pipeline import BLOCK_SIZE, stage_setup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_BLOCKS = 4000
SHORT = [(5, 1), (0, 1), (37, 1)]
SHORTER = [(0, 1), (2, 1), (19, 1), (300, 1)]
CUT = [(600, 1), (3, 1), (1, 1), (530, 1), (90, 1)]
CUT_ELSEWHERE = [(0, 1), (1400, 1), (700, 1), (0, 1), (511, 1)]
LONGEST = [(2047, 1)] * 7
IN_TURN = [CUT, SHORT, CUT_ELSEWHERE, SHORTER, LONGEST, CUT, [(9, 1)]]


@pytest.fixture(params=["float32", "bfloat16"])
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> StageWorker:
    folder = loud_llama(tmp_path / "loud", max_model_len=2048)
    setup = stage_setup(folder, 0, [range(load_spec(folder).num_layers)], request.param)
    setup.device, setup.graph_rows = "cuda", 8
    worker = StageWorker(host="127.0.0.1")
    worker.load(setup)
    begin(worker, NUM_BLOCKS)
    return worker


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever would make the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_in_turn(stage: StageWorker, batches: list[Spans]) -> None:
    for number, spans in enumerate(batches, 1):
        blocks = scattered(spans, BLOCK_SIZE, NUM_BLOCKS, seed=number)
        batch = packed(stage, new_requests(spans, blocks, first_id=100 * number))
        stage.compute(stage._decoder.embed(batch.token_ids_T), batch)


@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_same_launches(stage: StageWorker) -> None:
    """Of the padded batch: with other numbers of rows cuBLAS may take other kernels."""
    graphs = graphs_of(stage)
    for number, spans in enumerate(IN_TURN, 1):
        blocks = scattered(spans, BLOCK_SIZE, NUM_BLOCKS, seed=number)
        batch = packed(stage, new_requests(spans, blocks, first_id=100 * number))
        assert batch.graph is not None
        got = stage.compute(stage._decoder.embed(batch.token_ids_T), batch)
        assert torch.equal(got, graphs._work(batch.graph.padding)()[: len(spans)])
    assert len(graphs.sizes) == 3


@torch.inference_mode()
def test_a_replay_is_close_to_the_plan_without_padding(stage: StageWorker) -> None:
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[stage._dtype]
    for number, spans in enumerate(IN_TURN, 1):
        blocks = scattered(spans, BLOCK_SIZE, NUM_BLOCKS, seed=number)
        batch = packed(stage, new_requests(spans, blocks, first_id=100 * number))
        x_TH = stage._decoder.embed(batch.token_ids_T)
        expected = stage.compute(x_TH, replace(batch, graph=None))
        got = stage.compute(x_TH, batch)
        scale = expected.abs().max().item()
        torch.testing.assert_close(got, expected, atol=tolerance * scale, rtol=tolerance)


@torch.inference_mode()
def test_nobodys_kv_is_touched(stage: StageWorker) -> None:
    spans, blocks = SHORT, [[7, 9], [300], list(range(20, 30))]
    run_in_turn(stage, [SHORT])
    for cache in caches(stage):
        cache.fill_(7.0)
    batch = packed(stage, new_requests(spans, blocks, first_id=900))
    stage.compute(stage._decoder.embed(batch.token_ids_T), batch)
    own = {9 * BLOCK_SIZE + 1, 300 * BLOCK_SIZE, 29 * BLOCK_SIZE + 1}
    for cache in caches(stage):
        is_written = (cache != 7.0).flatten(2).any(-1).flatten()
        assert set(is_written.nonzero().flatten().tolist()) == own | {NUM_BLOCKS * BLOCK_SIZE}


@torch.inference_mode()
def test_no_replay_waits_for_the_device(stage: StageWorker) -> None:
    """Nor does taking in its plan, nor what is copied before and after."""
    run_in_turn(stage, IN_TURN)
    with no_wait():
        run_in_turn(stage, IN_TURN)


@torch.inference_mode()
def test_graphs_outlive_the_epoch_and_not_their_kv(stage: StageWorker) -> None:
    run_in_turn(stage, IN_TURN)
    following = stage.fresh()
    following.begin(None, None, num_blocks=NUM_BLOCKS)
    run_in_turn(following, IN_TURN)
    assert len(graphs_of(following).sizes) == 3
    following.begin(None, None, num_blocks=NUM_BLOCKS + 1)
    assert graphs_of(following).sizes == []
    run_in_turn(following, IN_TURN)
    torch.cuda.synchronize()
