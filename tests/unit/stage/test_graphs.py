"""Decodes as graphs: what they are padded to, what is copied, and that nobody's KV is touched.

On the checked device, where a replay is the captured work done again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from orca_kernels import AttentionContext, Kernels
from orca_kernels.dispatch import TORCH

from orca_dist.stage.batch import PackedBatch
from orca_dist.stage.graphs import padded_rows
from orca_dist.stage.worker import StageWorker
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.graph_stage import caches, checked_stage, graphs_of, new_requests, packed
from tests.fixtures.static_kernels import STATIC
from tests.fixtures.thread_pipeline import BLOCK_SIZE, NUM_BLOCKS, run_stage

SENTINEL = 7.0
SPANS = [(5, 1), (0, 1), (11, 1)]
BLOCKS = [(3, 9), (4,), (20, 21, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


def stage(folder: Path, kernels: Kernels = STATIC, *, graph_rows: int = 8) -> StageWorker:
    return checked_stage(folder, kernels, graph_rows=graph_rows, num_blocks=NUM_BLOCKS)


# ---- sizes -------------------------------------------------------------


def test_there_are_few_sizes_and_the_largest_is_the_bound() -> None:
    sizes = {padded_rows(num_rows, 300) for num_rows in range(1, 301)}
    assert sorted(sizes) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300]
    assert all(n <= padded_rows(n, 300) <= max(2 * n - 1, n) for n in range(1, 301))
    assert padded_rows(17, 20) == 20


@pytest.mark.parametrize(
    "spans", [[(3, 1), (0, 2)], [(1, 1)] * 5], ids=["a prompt among them", "too many"]
)
def test_others_than_a_few_decodes_go_without(folder: Path, spans: list[tuple[int, int]]) -> None:
    worker = stage(folder, graph_rows=4)
    blocks = [(block,) for block in range(len(spans))]
    assert packed(worker, new_requests(spans, blocks)).graph is None
    run_stage(worker, new_requests(spans, blocks, first_id=100))
    assert graphs_of(worker).sizes == []


@pytest.mark.parametrize(("kernels", "graph_rows"), [(TORCH, 4), (STATIC, 0)])
def test_no_graphs_no_scratch(folder: Path, kernels: Kernels, graph_rows: int) -> None:
    """Kernels that read lengths on the host can't be captured; or none was wanted."""
    worker = stage(folder, kernels, graph_rows=graph_rows)
    assert worker._graphs is None
    assert {len(cache) for cache in caches(worker)} == {NUM_BLOCKS}
    assert packed(worker, new_requests(SPANS, BLOCKS)).graph is None


def test_sizes_are_captured_once_each(folder: Path) -> None:
    worker = stage(folder, graph_rows=4)
    for first_id, num in ((10, 3), (20, 1), (30, 4), (40, 3)):
        run_stage(worker, new_requests(SPANS[:1] * num, BLOCKS[:1] * num, first_id=first_id))
    assert graphs_of(worker).sizes == [(4, 4, 0), (1, 1, 0)]


def test_another_epoch_has_the_same_graphs_unless_kv_is_made_anew(folder: Path) -> None:
    worker = stage(folder, graph_rows=4)
    run_stage(worker, new_requests(SPANS, BLOCKS))
    following = worker.fresh()
    following.begin(None, None, num_blocks=NUM_BLOCKS)
    assert graphs_of(following) is graphs_of(worker)
    following.begin(None, None, num_blocks=NUM_BLOCKS + 1)
    assert graphs_of(following).sizes == []


# ---- what a graph reads ------------------------------------------------


def test_a_batch_is_padded_with_rows_of_the_scratch_block(folder: Path) -> None:
    worker = stage(folder)
    batch = packed(worker, new_requests(SPANS, BLOCKS))
    assert batch.graph is not None
    positions, slots, tables, blocks = split(batch)
    assert (len(batch.positions_T), batch.context.lengths) == (3, [1, 1, 1])
    assert positions.tolist() == [5, 0, 11, 0]
    assert slots.tolist() == [9 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE, 2 * BLOCK_SIZE + 3, 512]
    assert blocks.tolist() == [3, 9, 4, 20, 21, 2, NUM_BLOCKS]
    tiles = batch.graph.padding.attention.over(tables)
    assert sorted(tiles.tiles[:, [0, 1, 3]].tolist()) == [
        [0, 5, 0],
        [1, 0, 2],
        [2, 11, 3],
        [3, 0, 6],
    ]


def split(batch: PackedBatch) -> list[torch.Tensor]:
    """Positions, slots, attention's tables, blocks, each with its padding."""
    assert batch.graph is not None
    padding, tables_N = batch.graph.padding, batch.graph.tables_N
    ends = [padding.num_rows, padding.num_rows, len(padding.tables)]
    return list(tables_N.split([*ends, len(tables_N) - sum(ends)]))


def test_what_is_captured_has_neither_starts_nor_lengths(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stage(folder)
    contexts: list[AttentionContext] = []
    forward = worker._decoder.forward

    def noting(
        x_TH: torch.Tensor,
        positions: torch.Tensor,
        cache: object,
        context: AttentionContext,
        **_: object,
    ) -> torch.Tensor:
        contexts.append(context)
        return forward(x_TH, positions, cache, context, **_)  # type: ignore[arg-type]

    monkeypatch.setattr(worker._decoder, "forward", noting)
    run_stage(worker, new_requests(SPANS, BLOCKS))
    assert contexts
    assert all((each.starts, each.lengths) == ([], []) for each in contexts)
    addresses = {each.flat_blocks.data_ptr() for each in contexts}
    static = graphs_of(worker)._tables_N
    (address,) = addresses
    assert static.data_ptr() < address < static.data_ptr() + static.nbytes


# ---- the same answers, and nobody's KV ---------------------------------


def test_padded_rows_change_no_bit_of_the_others(folder: Path) -> None:
    """The padded batch on the reference kernels, which take it as one of more requests."""
    worker = stage(folder)
    batch = packed(worker, new_requests([*SPANS, *SPANS[:2]], [*BLOCKS, *BLOCKS[:2]]))
    x_TH = worker._decoder.embed(batch.token_ids_T)
    expected = worker.compute(x_TH, replace(batch, graph=None))
    positions_R, slots_R, _, blocks = split(batch)
    lengths = [len(each) for each in batch.context.blocks] + [1] * 3
    padded = AttentionContext(
        starts=[*batch.context.starts, 0, 0, 0],
        lengths=[1] * 8,
        blocks=list(blocks.split(lengths)),
        slots_T=slots_R,
    )
    x_RH = torch.cat([x_TH, torch.full((3, x_TH.shape[1]), torch.nan)])
    got = worker._decoder.forward(x_RH, positions_R, worker._cache, padded, on_layer=lambda: None)  # type: ignore[arg-type]
    assert torch.equal(got[:5], expected)


@pytest.mark.parametrize("spans", [SPANS, [*SPANS, (8, 1), (9, 1)]])
def test_a_replay_writes_the_slots_of_its_plan_and_scratch(
    folder: Path, spans: list[tuple[int, int]]
) -> None:
    worker = stage(folder)
    blocks = [*BLOCKS, (30, 31, 32), (40, 41, 42)][: len(spans)]
    run_stage(worker, new_requests(spans, blocks, first_id=10))  # captures
    for cache in caches(worker):
        cache.fill_(SENTINEL)
    moved = [(start // 2, 1) for start, _ in spans]
    plan = new_requests(moved, blocks, first_id=100)
    run_stage(worker, plan)
    own = {
        held[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
        for (start, _), held in zip(moved, blocks, strict=True)
    }
    for cache in caches(worker):
        is_written = (cache != SENTINEL).flatten(2).any(-1).flatten()
        assert set(is_written.nonzero().flatten().tolist()) == own | {NUM_BLOCKS * BLOCK_SIZE}


def test_what_is_left_of_larger_batches_is_not_read(folder: Path) -> None:
    """Static buffers full of what makes NaN of whoever reads it."""
    worker = stage(folder)
    batch = packed(worker, new_requests(SPANS, BLOCKS))
    x_TH = worker._decoder.embed(batch.token_ids_T)
    expected = worker.compute(x_TH, batch)
    graphs_of(worker)._x_RH[len(x_TH) :] = torch.nan
    graphs_of(worker)._tables_N.fill_(2**40)
    assert torch.equal(worker.compute(x_TH, batch), expected)


def test_what_a_replay_leaves_is_not_the_pools(folder: Path) -> None:
    worker = stage(folder)
    first, second = (packed(worker, new_requests(SPANS, BLOCKS, first_id=id)) for id in (10, 100))
    x_TH = worker._decoder.embed(first.token_ids_T)
    before = worker.compute(x_TH, first)
    kept = before.clone()
    worker.compute(worker._decoder.embed(second.token_ids_T), second)
    assert torch.equal(before, kept)


def test_the_next_plan_is_taken_in_behind_a_replay(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the device is at it; and whether the epoch is over was asked before."""
    worker = stage(folder)
    run_stage(worker, new_requests(SPANS, BLOCKS))
    graphs, happened = graphs_of(worker), []
    run = graphs.run
    monkeypatch.setattr(graphs, "run", lambda *given: happened.append("replay") or run(*given))
    worker.look_ahead = lambda: happened.append("look ahead")
    run_stage(worker, new_requests(SPANS, BLOCKS, first_id=100))
    assert happened == ["look ahead", "replay", "look ahead"]
