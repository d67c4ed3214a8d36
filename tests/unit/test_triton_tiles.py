"""How a batch is laid out over the programs of the Triton kernels, and who gets these kernels."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from orca_kernels import dispatch, kernels_for
from orca_kernels.triton.tiles import (
    CHUNK,
    KEYS,
    MAX_CHUNKS,
    NARROW,
    SHORT,
    Tiles,
    decode_tiles_of,
    tiles_of,
)

CUDA = torch.device("cuda", 0)
WIDE = 64

# ---- tiles -------------------------------------------------------------

spans = st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 300)), min_size=1, max_size=6)
groups = st.sampled_from([1, 2, 3, 7, 8, 16, 32, 71])


def tiled(batch: list[tuple[int, int]], group: int) -> Tiles:
    starts, lengths = zip(*batch, strict=True)
    return tiles_of(starts, lengths, [10] * len(batch), group, WIDE)


@given(batch=spans, group=groups)
def test_tiles_cover_every_row_and_what_it_sees_once(
    batch: list[tuple[int, int]], group: int
) -> None:
    tiles = tiled(batch, group)
    seen: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for first_row, start, length, first_block, row, first, end, _ in tiles.tiles.tolist():
        index = first_block // 10
        assert (start, length) == batch[index]
        assert first_row == sum(length for _, length in batch[:index])
        seen.setdefault(index, {}).setdefault(row, []).append((first, end))
    for index, (start, length) in enumerate(batch):
        size = NARROW if length * group <= NARROW else WIDE
        assert sorted(seen[index]) == list(range(0, length * group, size))
        for row, pieces in seen[index].items():
            last = min(row + size, length * group) - 1
            covered = sorted(key for piece in pieces for key in piece if piece[0] < piece[1])
            assert (covered[0], covered[-1]) == (0, start + last // group + 1)
            assert covered[1:-1:2] == covered[2::2]  # each begins where the one before ends
            assert all(first % KEYS == 0 for first, _ in pieces)
            assert len(pieces) <= MAX_CHUNKS


@given(batch=spans, group=groups)
def test_a_request_is_cut_the_same_way_among_others(
    batch: list[tuple[int, int]], group: int
) -> None:
    together = tiled(batch, group).tiles.tolist()
    for index, span in enumerate(batch):
        mine = [tile[4:7] for tile in together if tile[3] == 10 * index]
        assert mine == [tile[4:7] for tile in tiled([span], group).tiles.tolist()]


@given(batch=spans, group=groups)
def test_partial_results_have_rows_of_their_own_and_are_all_merged(
    batch: list[tuple[int, int]], group: int
) -> None:
    tiles = tiled(batch, group)
    left = [tile for tile in tiles.tiles.tolist() if tile[7] >= 0]
    written = []
    for *_, row, _, _, first in left:
        size = NARROW if _length_of(left, first) * group <= NARROW else WIDE
        written += range(first, first + min(size, _length_of(left, first) * group - row))
    merged = []
    for _, _, num_rows, first, num_chunks in tiles.merges.tolist():
        assert 1 < num_chunks <= MAX_CHUNKS
        assert num_rows <= tiles.max_merged_rows
        merged += range(first, first + num_rows * num_chunks)
    assert sorted(written) == sorted(merged) == list(range(tiles.num_partial_rows))


def _length_of(tiles: list[list[int]], partial: int) -> int:
    return next(tile[2] for tile in tiles if tile[7] == partial)


def test_decodes_are_narrow_and_only_short_requests_have_their_context_cut() -> None:
    assert not tiled([(5000, 1), (0, 2)], 8).has_wide
    assert tiled([(5000, 1), (0, 3)], 8).has_wide
    assert len(tiled([(CHUNK - 1, 1)], 8).tiles) == 1
    assert len(tiled([(CHUNK, 1)], 8).tiles) == 2
    assert len(tiled([(5000, SHORT // 8)], 8).merges) == SHORT // WIDE
    assert len(tiled([(5000, SHORT // 8 + 1)], 8).merges) == 0


def test_the_costliest_programs_come_first() -> None:
    costs = [
        end - first for *_, first, end, _ in tiled([(3, 1), (0, 200), (90, 1)], 1).tiles.tolist()
    ]
    assert costs == sorted(costs, reverse=True)


# ---- tiles that are captured -------------------------------------------

decodes = st.lists(st.integers(0, 40_000), min_size=1, max_size=6)


def decoded(starts: list[int], group: int) -> Tiles:
    return decode_tiles_of(starts, [10] * len(starts), group, WIDE)


@given(starts=decodes, group=groups)
def test_decodes_have_the_tiles_of_any_batch_and_idle_ones(starts: list[int], group: int) -> None:
    exact, padded = tiled([(start, 1) for start in starts], group), decoded(starts, group)
    for ours, theirs in ((padded.tiles, exact.tiles), (padded.merges, exact.merges)):
        assert torch.equal(ours[: len(theirs)], theirs)
        assert not ours[len(theirs) :].any(), "length 0, and no rows to merge"
    assert padded.num_partial_rows >= exact.num_partial_rows
    assert padded.max_merged_rows >= exact.max_merged_rows
    assert padded.has_wide == exact.has_wide


@given(starts=st.lists(decodes, min_size=2, max_size=2), group=groups)
def test_all_but_the_tables_follows_from_their_sizes(starts: list[list[int]], group: int) -> None:
    """And how many there are, so that a launch which was captured serves them all."""
    num = min(map(len, starts))
    first, second = (decoded(each[:num], group) for each in starts)
    if first.sizes == second.sizes:
        rest = ("has_wide", "max_merged_rows", "num_partial_rows")
        assert all(asdict(first)[name] == asdict(second)[name] for name in rest)


@given(starts=decodes, group=groups)
def test_there_are_four_sizes(starts: list[int], group: int) -> None:
    uncut = len(decoded([0] * len(starts), group).tiles)
    padded, num = decoded(starts, group), len(tiled([(start, 1) for start in starts], group).tiles)
    assert len(padded.tiles) // uncut in (1, 4, 16, MAX_CHUNKS)
    assert num <= len(padded.tiles) < max(4 * num, uncut + 1)
    assert len(padded.merges) == (uncut if num > uncut else 0)


def test_a_longest_context_has_the_most_programs() -> None:
    assert decoded([40_000] * 3, 8).sizes == (3 * MAX_CHUNKS, 3)
    assert decoded([40_000, 0, 0], 8).sizes == (3 * 16, 3)
    assert decoded([CHUNK - 1] * 3, 8).sizes == (3, 0)


@given(starts=decodes, group=groups)
def test_packed_tables_can_be_laid_over_again(starts: list[int], group: int) -> None:
    tiles = decoded(starts, group)
    packed = tiles.packed()
    assert packed.dtype is torch.int64
    over = tiles.over(packed)
    assert torch.equal(over.tiles, tiles.tiles)
    assert torch.equal(over.merges, tiles.merges)
    packed.zero_()
    assert not over.tiles.any(), "views"


# ---- dispatch ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_has_triton_kernels(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels_for(CUDA, dtype, 1).name == "triton"


def test_a_gpu_too_old_has_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert kernels_for(CUDA, torch.float16, 1) is dispatch.TORCH
    (record,) = caplog.records
    assert "7.5" in record.getMessage()
    assert "8.0" in record.getMessage()
