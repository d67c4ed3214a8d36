"""The reference attention against a naive softmax loop, dense and over scattered blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orca_kernels import AttentionContext, reference
from orca_kernels.reference import attend

HEAD_DIM = 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BACKEND = reference


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def naive(
    q_LND: torch.Tensor,
    k_CMD: torch.Tensor,
    v_CMD: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Row by row and head by head, in double."""
    (num_rows, num_heads, _), (num_tokens, num_kv_heads, _) = q_LND.shape, k_CMD.shape
    out = torch.empty(q_LND.shape, dtype=torch.double)
    for row in range(num_rows):
        end = num_tokens - num_rows + row + 1
        seen = slice(max(0, end - (window or end)), end)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            k, v = k_CMD[seen, kv_head].double(), v_CMD[seen, kv_head].double()
            scores = k @ q_LND[row, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = torch.softmax(scores, dim=0) @ v
    return out


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


# ---- one request -------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (4, 2), (4, 1), (8, 2)])
@pytest.mark.parametrize("start", [0, 1, 37])
@pytest.mark.parametrize("length", [1, 2, 19])
@pytest.mark.parametrize("window", [None, 1, 5, 19, 100])
@pytest.mark.parametrize("softcap", [None, 0.3])
def test_attend_is_causal_softmax(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    start: int,
    length: int,
    window: int | None,
    softcap: float | None,
) -> None:
    q_LND = noise(length, num_heads, HEAD_DIM, dtype=dtype)
    k_CMD = noise(start + length, num_kv_heads, HEAD_DIM, dtype=dtype, seed=1)
    v_CMD = noise(start + length, num_kv_heads, HEAD_DIM, dtype=dtype, seed=2)
    out_LND = attend(q_LND, k_CMD, v_CMD, 0.3, window, softcap)
    assert (out_LND.dtype, out_LND.shape) == (dtype, q_LND.shape)
    close(out_LND, naive(q_LND, k_CMD, v_CMD, 0.3, window, softcap))


def test_no_row_sees_what_comes_after_it() -> None:
    q_LND, k_CMD, v_CMD = noise(5, 4, 8), noise(9, 2, 8, seed=1), noise(9, 2, 8, seed=2)
    before = attend(q_LND, k_CMD, v_CMD, 0.3)
    k_CMD[7:], v_CMD[7:] = 100.0, 100.0
    after = attend(q_LND, k_CMD, v_CMD, 0.3)
    assert torch.equal(after[:3], before[:3])
    assert not torch.equal(after[3:], before[3:])


# ---- a batch over paged KV ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a batch: `start` tokens are cached, `length` come now."""

    start: int
    length: int
    blocks: list[int]


@dataclass(slots=True)
class PagedBatch:
    """Entries with keys, values and queries of their own; unused slots hold NaN."""

    entries: list[Entry]
    block_size: int
    num_blocks: int
    num_heads: int = 4
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float32

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, HEAD_DIM)
        empty = torch.full(shape, torch.nan, dtype=self.dtype)
        return empty, empty.clone()

    def kv(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of an entry, [C, M, D] each."""
        entry = self.entries[index]
        shape = (entry.start + entry.length, self.num_kv_heads, HEAD_DIM)
        return (
            noise(*shape, dtype=self.dtype, seed=3 * index),
            noise(*shape, dtype=self.dtype, seed=3 * index + 1),
        )

    def q(self, index: int) -> torch.Tensor:
        shape = (self.entries[index].length, self.num_heads, HEAD_DIM)
        return noise(*shape, dtype=self.dtype, seed=3 * index + 2)

    def context(self, indices: list[int], *, cached: bool = False) -> AttentionContext:
        """Of the entries' new tokens, or of those cached before."""
        entries = [self.entries[index] for index in indices]
        spans = [(0, e.start) if cached else (e.start, e.length) for e in entries]
        slots = [
            entry.blocks[at // self.block_size] * self.block_size + at % self.block_size
            for entry, (start, length) in zip(entries, spans, strict=True)
            for at in range(start, start + length)
        ]
        return AttentionContext(
            starts=[start for start, _ in spans],
            lengths=[length for _, length in spans],
            blocks=[torch.tensor(entry.blocks) for entry in entries],
            slots_T=torch.tensor(slots, dtype=torch.long),
        )

    def run(self, indices: list[int], softcap: float | None = None) -> torch.Tensor:
        """Write what was cached, then the new tokens; attend with the new ones."""
        cache = self.cache()
        starts = [self.entries[index].start for index in indices]
        kvs = [self.kv(index) for index in indices]
        parts = list(zip(kvs, starts, strict=True))
        self._write(cache, [(k[:s], v[:s]) for (k, v), s in parts], indices, cached=True)
        self._write(cache, [(k[s:], v[s:]) for (k, v), s in parts], indices, cached=False)
        q_TND = torch.cat([self.q(index) for index in indices])
        context = self.context(indices)
        return BACKEND.paged_attention(q_TND, *cache, context, 0.3, softcap=softcap)

    def _write(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        kvs: list[tuple[torch.Tensor, torch.Tensor]],
        indices: list[int],
        *,
        cached: bool,
    ) -> None:
        k_TMD = torch.cat([k for k, _ in kvs])
        v_TMD = torch.cat([v for _, v in kvs])
        BACKEND.write_kv(k_TMD, v_TMD, *cache, self.context(indices, cached=cached))

    def split(self, out_TND: torch.Tensor) -> list[torch.Tensor]:
        return list(out_TND.split([entry.length for entry in self.entries]))


def scattered(
    lengths: list[tuple[int, int]], block_size: int, order: list[int], dtype: torch.dtype
) -> PagedBatch:
    """(start, length) entries over blocks dealt in `order`; some blocks are spare."""
    blocks, entries = iter(order), []
    for start, length in lengths:
        num = -(-(start + length) // block_size)
        entries.append(Entry(start, length, [next(blocks) for _ in range(num)]))
    return PagedBatch(entries, block_size, len(order), dtype=dtype)


@st.composite
def batches(draw: st.DrawFn) -> PagedBatch:
    """Mixed batches: decodes, prefills and chunks, each over blocks of its own."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=5)
    )
    num_needed = sum(-(-(start + length) // block_size) for start, length in lengths)
    order = draw(st.permutations(range(num_needed + draw(st.integers(0, 3)))))
    return scattered(lengths, block_size, order, draw(st.sampled_from(list(TOLERANCE))))


@settings(max_examples=30)
@given(batches())
def test_paged_attention_is_naive_attention_of_each_request(batch: PagedBatch) -> None:
    """Over any block tables, and without a look at slots that nobody wrote."""
    indices = list(range(len(batch.entries)))
    for index, out_LND in enumerate(batch.split(batch.run(indices))):
        close(out_LND, naive(batch.q(index), *batch.kv(index), 0.3))


@settings(max_examples=20)
@given(batches())
def test_a_request_has_the_same_bits_alone_or_batched(batch: PagedBatch) -> None:
    indices = list(range(len(batch.entries)))
    for softcap in (None, 0.3):
        for index, out_LND in enumerate(batch.split(batch.run(indices, softcap))):
            assert torch.equal(batch.run([index], softcap), out_LND)


def test_long_requests_over_reversed_blocks() -> None:
    lengths = [(0, 70), (130, 1), (64, 33), (511, 1)]
    batch = scattered(lengths, 16, list(range(60, -1, -1)), torch.float32)
    for index, out_LND in enumerate(batch.split(batch.run([0, 1, 2, 3]))):
        close(out_LND, naive(batch.q(index), *batch.kv(index), 0.3))


def test_write_kv_touches_its_slots_alone() -> None:
    batch = scattered([(3, 2), (0, 1)], 4, [2, 0, 1], torch.float32)
    cache = batch.cache()
    k_TMD, v_TMD = noise(3, 2, HEAD_DIM), noise(3, 2, HEAD_DIM, seed=1)
    BACKEND.write_kv(k_TMD, v_TMD, *cache, batch.context([0, 1]))
    for rows_BSMD, written in zip(cache, (k_TMD, v_TMD), strict=True):
        rows = rows_BSMD.flatten(0, 1)
        assert torch.equal(rows[[11, 0, 4]], written)
        rows[[11, 0, 4]] = torch.nan
        assert rows.isnan().all()
