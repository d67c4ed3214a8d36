"""Attention by FlashInfer, without it: what it is told of a batch, and how often."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orca_kernels import AttentionContext, reference
from orca_kernels.dispatch import TORCH, Kernels, NoFlashInfer, triton_kernels, with_flash_infer
from orca_kernels.flash_infer import (
    DTYPES,
    HEAD_DIMS,
    WORKSPACE_BYTES,
    FlashInferAttention,
    tables_of,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from orca_dist.engine.kv_size import FLASHINFER_BYTES
from orca_dist.errors import ConfigError
from orca_dist.stage.backend import with_attention
from tests.fixtures.fake_gpu import FakeGpu
from tests.fixtures.flash_wrapper import ShapedWrapper, TorchWrapper
from tests.fixtures.kernel_cases import Mix, PagedCase, check_attention, mixes

MIX = Mix(spans=((0, 20), (33, 1), (16, 16), (5, 9)), head_dim=64, dtype=torch.bfloat16)


class Noted:
    """Wrappers as they are made, and the attention that makes them; `left` went elsewhere."""

    def __init__(self) -> None:
        self.wrappers: list[TorchWrapper] = []
        self.left = 0
        self.attention = FlashInferAttention(self.make, self.elsewhere)

    def make(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> TorchWrapper:
        self.wrappers.append(TorchWrapper(float_workspace_buffer, kv_layout))
        return self.wrappers[-1]

    def elsewhere(
        self,
        q_TND: torch.Tensor,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        self.left += 1
        if context.tables is not None:
            return torch.empty_like(q_TND)
        return reference.paged_attention(q_TND, k_BSMD, v_BSMD, context, scale, window, softcap)

    @property
    def num_plans(self) -> list[int]:
        return [len(wrapper.plans) for wrapper in self.wrappers]


# ---- tables ------------------------------------------------------------

served = mixes(150, HEAD_DIMS).filter(lambda mix: mix.dtype in DTYPES)


@settings(max_examples=30)
@given(mix=served)
def test_tables_say_what_a_batch_is(mix: Mix) -> None:
    """Attention by nothing but what plan() was given equals the reference."""
    noted = Noted()
    check_attention(mix, noted.attention)
    assert (noted.num_plans, noted.left) == ([1], 0)


@given(
    spans=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=5),
    spare=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_blocks_that_are_not_filled_yet_are_left_out(
    spans: list[tuple[int, int]], spare: list[int], block_size: int
) -> None:
    """A page more would count as full of tokens."""
    counts = [-(-sum(span) // block_size) for span in spans]
    held = [count + more for count, more in zip(counts, spare, strict=False)]
    blocks = list(torch.arange(100, 100 + sum(held)).split(held))
    starts, lengths = ([span[at] for span in spans] for at in (0, 1))
    context = AttentionContext(starts=starts, lengths=lengths, blocks=blocks, slots_T=blocks[0])
    tables = tables_of(context, block_size)
    assert tables.kv_indptr.diff().tolist() == counts
    filled = [each[:count] for each, count in zip(blocks, counts, strict=True)]
    assert tables.kv_indices.tolist() == torch.cat(filled).tolist()
    full = (tables.kv_indptr.diff() - 1) * block_size
    assert (full + tables.last_page_len).tolist() == [sum(span) for span in spans]


# ---- plans -------------------------------------------------------------


def test_a_batch_is_planned_once_for_each_kind_of_layer() -> None:
    """Gemma's layers alternate: with a window and without."""
    noted, case, other = Noted(), PagedCase(MIX), PagedCase(replace(MIX, spans=((7, 2),)))
    for batch, num_plans in ((case, 1), (other, 2), (case, 3)):
        context = batch.context()
        for window in (None, 5, None, 5):
            given = (batch.q, batch.k, batch.v, context, batch.scale, window)
            wanted = reference.paged_attention(*given)
            torch.testing.assert_close(noted.attention(*given), wanted, atol=2e-2, rtol=2e-2)
        assert noted.num_plans == [num_plans] * 2
    assert [wrapper.plans[0].window_left for wrapper in noted.wrappers] == [-1, 4]
    assert noted.wrappers[0].workspace is noted.wrappers[1].workspace


@pytest.mark.parametrize(
    "mix", [replace(MIX, dtype=torch.float32), replace(MIX, head_dim=80)], ids=["type", "head"]
)
def test_the_rest_goes_to_the_other_kernels(mix: Mix) -> None:
    noted = Noted()
    check_attention(mix, noted.attention)
    assert (noted.num_plans, noted.left) == ([], 1)


def test_so_does_what_is_captured() -> None:
    """It has no starts and no lengths."""
    noted, case = Noted(), PagedCase(MIX)
    decode_tables = triton_kernels((9, 0)).decode_tables
    assert decode_tables is not None
    make = decode_tables(group=3, head_dim=64, itemsize=2)
    assert make is not None
    captured = replace(case.context(), starts=[], lengths=[], tables=make([3], [1]))
    noted.attention(case.q, case.k, case.v, captured, case.scale)
    assert (noted.num_plans, noted.left) == ([], 1)


class Mark:
    """An event of a stream that has not come that far."""

    def __init__(self, told: list[str], wrapper: TorchWrapper) -> None:
        self._told = told
        self._wrapper = wrapper

    def synchronize(self) -> None:
        self._told.append(f"waited behind plan {len(self._wrapper.plans)}")


def test_a_wrapper_is_planned_again_when_its_tables_have_been_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU of shapes, which also refuses whatever the host would read from it."""
    told: list[str] = []

    wrappers: list[ShapedWrapper] = []

    def make(float_workspace_buffer: torch.Tensor, kv_layout: str) -> ShapedWrapper:
        wrappers.append(ShapedWrapper(float_workspace_buffer, kv_layout))
        return wrappers[-1]

    def mark() -> Mark:
        told.append(f"marked behind plan {len(wrappers[0].plans)}")
        return Mark(told, wrappers[0])

    monkeypatch.setattr("orca_kernels.flash_infer.copy_mark", mark)
    attention = FlashInferAttention(make, TORCH.paged_attention)
    gpu = FakeGpu(10**9, FakeTensorMode())
    with gpu.running():
        q_TND = torch.empty(30, 6, 64, dtype=torch.bfloat16, device="cuda:0")
        k_BSMD = torch.empty(9, 16, 2, 64, dtype=torch.bfloat16, device="cuda:0")
        for _ in range(2):
            blocks = [torch.empty(3, dtype=torch.int64, device="cuda:0") for _ in range(2)]
            spans = {"starts": [0, 7], "lengths": [20, 10]}
            context = AttentionContext(**spans, blocks=blocks, slots_T=blocks[0])
            for _ in range(2):
                attention(q_TND, k_BSMD, k_BSMD, context, 0.1)
    assert told == ["marked behind plan 1", "waited behind plan 1", "marked behind plan 2"]
    assert gpu.num_reads == 0


# ---- who gets it -------------------------------------------------------


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with such a wrapper."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = TorchWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)


@pytest.fixture
def kernels() -> Kernels:
    return triton_kernels((9, 0))


@pytest.mark.usefixtures("flashinfer")
def test_only_attention_is_its(kernels: Kernels) -> None:
    made = with_flash_infer(kernels)
    check_attention(MIX, made.paged_attention)
    same = replace(made, name=kernels.name, paged_attention=kernels.paged_attention)
    assert same == kernels, "graphs of decodes among them"


def test_where_it_is_not_installed_it_is_refused(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"^attention_backend = flashinfer: .* imported .*every"):
        with_attention(kernels, "flashinfer")
    assert with_attention(kernels, "triton") is kernels


@pytest.mark.usefixtures("flashinfer")
def test_a_gpu_that_is_too_old_for_triton_has_neither() -> None:
    with pytest.raises(NoFlashInfer, match="Triton kernels, and this device has torch's"):
        with_flash_infer(TORCH)


def test_the_engine_counts_its_workspace() -> None:
    """And for two wrappers their tables: 8 MiB, and the lengths of contexts."""
    assert FLASHINFER_BYTES >= WORKSPACE_BYTES + 2 * (8 * 2**20 + 4 * 32768)
