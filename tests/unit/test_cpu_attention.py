"""The C++ attention kernel: right against the reference, the same bits however it is cut."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orca_kernels import AttentionContext, kernels_for, reference
from orca_kernels.cpu import build, sample
from orca_kernels.cpu.attention import CpuAttention, empty_kv

from tests.fixtures.cpu_library import cpu_library

Spans = list[tuple[int, int]]  # (start, length) of each request
CPU = torch.device("cpu")
LONG = 300  # slots: more than two of the spans that the kernel takes in one after the other


class Case:
    """Random queries over a cache in which every request's blocks lie scattered."""

    def __init__(
        self,
        spans: Spans,
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        softcap: float | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_blocks = [-(-(start + length) // block_size) for start, length in spans]
        order = torch.randperm(sum(num_blocks) + 3, generator=generator)[3:]
        self.blocks = list(order.split(num_blocks))
        cache = (sum(num_blocks) + 3, block_size, heads[1], head_dim)
        self.k, self.v = empty_kv(*cache, dtype, CPU)
        for room in (self.k, self.v):
            room.copy_(torch.randn(cache, generator=generator))
        rows = sum(length for _, length in spans)
        self.q = torch.randn(rows, heads[0], head_dim, generator=generator).to(dtype)
        self.spans = spans
        self.window, self.softcap = window, softcap
        self.scale = head_dim**-0.5

    def context(self, spans: Spans | None = None, blocks: list[torch.Tensor] | None = None):  # type: ignore[no-untyped-def]
        spans = spans or self.spans
        return AttentionContext(
            starts=[start for start, _ in spans],
            lengths=[length for _, length in spans],
            blocks=blocks or self.blocks,
            slots_T=torch.empty(0, dtype=torch.long),
        )

    def run(self, kernel: CpuAttention) -> torch.Tensor:
        return self.attend(kernel, self.q, self.context())

    def attend(
        self, kernel: CpuAttention, q_TND: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        return kernel(q_TND, self.k, self.v, context, self.scale, self.window, self.softcap)

    def truth(self) -> torch.Tensor:
        wide = (tensor.float() for tensor in (self.q, self.k, self.v))
        context = self.context()
        return reference.paged_attention(*wide, context, self.scale, self.window, self.softcap)


@pytest.fixture(scope="module")
def kernel() -> CpuAttention:
    return CpuAttention(cpu_library(), 1)


windows = st.none() | st.integers(1, LONG)
softcaps = st.none() | st.sampled_from([0.3, 2.0, 50.0])  # scores spread by 1
spans = st.lists(st.tuples(st.integers(0, LONG), st.integers(1, 40)), min_size=1, max_size=6)


@settings(max_examples=100)
@given(
    spans=spans,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([8, 16, 24, 32, 64, 80, 128]),
    block_size=st.sampled_from([1, 3, 4, 16, 20, 32]),
    window=windows,
    softcap=softcaps,
)
def test_equals_the_reference(
    spans: Spans,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    case = Case(
        spans,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
    )
    torch.testing.assert_close(
        case.run(CpuAttention(cpu_library(), 1)), case.truth(), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bfloat16_is_the_rounded_result(kernel: CpuAttention, softcap: float | None) -> None:
    case = Case([(0, 33), (70, 1), (5, 9)], dtype=torch.bfloat16, softcap=softcap)
    expected = case.truth()
    torch.testing.assert_close(case.run(kernel).float(), expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 150])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_or_batched_same_bits(
    kernel: CpuAttention, dtype: torch.dtype, softcap: float | None, window: int | None
) -> None:
    spans = [(0, 33), (70, 1), (5, 9), (0, 1), (31, 17), (LONG, 1), (110, 60)]
    case = Case(spans, dtype=dtype, window=window, softcap=softcap)
    together = case.run(kernel).split([length for _, length in case.spans])
    row = 0
    for span, blocks, expected in zip(case.spans, case.blocks, together, strict=True):
        alone = case.attend(kernel, case.q[row : row + span[1]], case.context([span], [blocks]))
        assert torch.equal(alone, expected)
        row += span[1]


@settings(max_examples=60)
@given(
    cuts=st.sets(st.integers(1, LONG - 1), max_size=8),
    block_size=st.sampled_from([4, 16, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=windows,
    softcap=softcaps,
)
def test_any_cut_of_a_prompt_same_bits(
    cuts: set[int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    kernel = CpuAttention(cpu_library(), 1)
    case = Case([(0, LONG)], block_size=block_size, dtype=dtype, window=window, softcap=softcap)
    whole = case.run(kernel)
    ends = [*sorted(cuts), LONG]
    for start, end in zip([0, *ends], ends, strict=False):
        context = case.context([(start, end - start)])
        chunk = case.attend(kernel, case.q[start:end], context)
        assert torch.equal(chunk, whole[start:end])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (30, 2.0)])
def test_any_number_of_threads_same_bits(
    kernel: CpuAttention, window: int | None, softcap: float | None
) -> None:
    spans = [(0, 200), (3, 1), (100, 60)]  # dear enough to be shared out
    case = Case(spans, window=window, softcap=softcap)
    expected = case.run(kernel)
    for num_threads in (2, 3, 7):
        assert torch.equal(case.run(CpuAttention(cpu_library(), num_threads)), expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_unwritten_slots_are_not_read(kernel: CpuAttention, softcap: float | None) -> None:
    case = Case([(0, 5), (20, 1)], softcap=softcap)
    expected = case.run(kernel)
    k, v = case.k[case.blocks[0]], case.v[case.blocks[0]]
    k[:, 5:], v[:, 5:] = torch.nan, torch.nan
    case.k[case.blocks[0]], case.v[case.blocks[0]] = k, v
    assert torch.equal(case.run(kernel), expected)


def test_a_window_that_holds_everything_changes_no_bit(kernel: CpuAttention) -> None:
    spans = [(0, 33), (70, 1), (5, 9)]
    assert torch.equal(Case(spans, window=71).run(kernel), Case(spans).run(kernel))
    assert not torch.equal(Case(spans, window=70).run(kernel), Case(spans).run(kernel))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 0.5, 2.0, 30.0, 1e30])
@pytest.mark.parametrize("softcap", [0.3, 50.0])
def test_a_capped_score_is_its_formula(kernel: CpuAttention, softcap: float, scale: float) -> None:
    """One key against one of score 0 tells the capped score: the shares are e^score to 1."""
    score = torch.tensor([-1.0, -0.3, 0.2, 0.7, 1.0], dtype=torch.double) * softcap * scale
    case = Case([(1, 1)] * 5, heads=(1, 1), head_dim=8, softcap=softcap)
    case.scale = 1.0
    case.k.zero_(), case.v.zero_(), case.q.zero_()
    case.q[:, 0, 0] = score
    for blocks in case.blocks:
        case.k[blocks[0], 0, 0, 0] = case.v[blocks[0], 0, 0, 0] = 1.0
    wanted = (softcap * (score / softcap).tanh()).sigmoid()
    shares = case.run(kernel)[:, 0, 0].double()
    torch.testing.assert_close(shares, wanted, atol=3e-7, rtol=0)


def test_a_small_cap_shows(kernel: CpuAttention) -> None:
    spans = [(0, 33), (70, 1)]
    whole = Case(spans).run(kernel)
    assert (Case(spans, softcap=0.3).run(kernel) - whole).abs().max() > 0.1
    assert (Case(spans, softcap=1e4).run(kernel) - whole).abs().max() < 1e-5


def test_what_lies_before_the_window_is_not_used(kernel: CpuAttention) -> None:
    """A row sees its own position and the nine before it, in a block cut in two as well."""
    case = Case([(40, 1)], window=10)
    expected = case.run(kernel)
    hidden = torch.arange(31)
    blocks, slots = case.blocks[0][hidden // 16], hidden % 16
    case.k[blocks, slots], case.v[blocks, slots] = torch.nan, torch.nan
    assert torch.equal(case.run(kernel), expected)
    case.v[case.blocks[0][31 // 16], 31 % 16] += 1.0
    assert not torch.equal(case.run(kernel), expected)


def test_a_cache_of_another_layout_is_refused(kernel: CpuAttention) -> None:
    case = Case([(0, 5)])
    case.k = case.k.contiguous()
    with pytest.raises(ValueError, match="empty_kv"):
        case.run(kernel)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_nan_stays_with_its_request(kernel: CpuAttention, softcap: float | None) -> None:
    case = Case([(0, 5), (20, 1)], softcap=softcap)
    expected = case.run(kernel)
    case.k[case.blocks[0][0], 2] = torch.nan
    poisoned = case.run(kernel)
    assert poisoned[2:5].isnan().all()
    assert torch.equal(poisoned[5:], expected[5:])


@pytest.mark.slow
def test_built_once_by_whoever_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))  # the sooner it is done
    links: list[Path] = []
    link = build._link

    def noted(compiler: str, made: Path) -> Path:
        links.append(made)
        return link(compiler, made)

    monkeypatch.setattr(build, "_link", noted)
    threads = [threading.Thread(target=build.load_library) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(links) == 1
    folder = tmp_path / "orca-dist/kernels"
    (made,) = folder.glob("*.so")
    build.load_library()
    assert len(links) == 1
    assert set(os.listdir(folder)) == {made.name, build.LOCK}


@pytest.mark.parametrize(
    ("compiler", "words"), [("/no/such/c++", "can't be run"), ("false", "failed")]
)
def test_without_a_compiler_torch_does_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiler: str,
    words: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    backend = kernels_for(CPU, torch.float32, 1)
    assert backend.name == "torch"
    assert backend.paged_attention is reference.paged_attention
    (record,) = caplog.records
    assert words in record.getMessage()


def test_dispatch() -> None:
    assert kernels_for(CPU, torch.bfloat16, 1).name == "cpu"
    backend = kernels_for(CPU, torch.float16, 1)
    assert (backend.name, backend.sample) == ("torch", sample.sample), "no sorting on a CPU"
