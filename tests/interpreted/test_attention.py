"""The Triton attention kernels, step by step on the CPU, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from orca_kernels.triton.attention import TritonAttention

from tests.fixtures.kernel_cases import (
    DTYPES,
    Mix,
    PagedCase,
    check_attention,
    check_same_bits_alone,
    close,
    mixes,
)

SPLIT = Mix(spans=((1500, 1), (700, 20), (1300, 2), (3, 1)), heads=(8, 1))


@settings(max_examples=12)
@given(mix=mixes(max_start=90))
@example(mix=Mix(spans=((0, 33), (70, 1), (5, 9)), heads=(9, 3), head_dim=80, block_size=3))
@example(mix=Mix(spans=((0, 1),), heads=(1, 1), head_dim=8, block_size=1, window=1))
@example(mix=Mix(spans=((0, 33), (70, 1), (600, 1)), softcap=0.3, window=40))
def test_any_mix(mix: Mix) -> None:
    check_attention(mix, TritonAttention())


@pytest.mark.slow
@settings(max_examples=40)
@given(mix=mixes(max_start=300))
def test_many_mixes(mix: Mix) -> None:
    check_attention(mix, TritonAttention())


@pytest.mark.slow
@settings(max_examples=8)
@given(mix=mixes(max_start=3000, head_dims=(32, 128)))
def test_many_long_mixes(mix: Mix) -> None:
    check_attention(mix, TritonAttention())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (600, None), (600, 0.3)])
def test_long_contexts_are_split_and_merged(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    mix = Mix(spans=SPLIT.spans, heads=SPLIT.heads, dtype=dtype, window=window, softcap=softcap)
    check_attention(mix, TritonAttention())


@pytest.mark.slow
def test_a_context_of_more_chunks_than_are_merged_has_longer_ones() -> None:
    check_attention(Mix(spans=((17000, 1),), heads=(2, 1), head_dim=16), TritonAttention())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (40, 2.0)])
def test_a_request_has_the_same_bits_alone_or_batched(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    """Decodes beside prompts as well, where their tiles are not all of one kind."""
    spans = ((0, 33), (70, 1), (5, 9), (0, 1), (1100, 1), (600, 4))
    mix = Mix(spans=spans, dtype=dtype, window=window, softcap=softcap)
    check_same_bits_alone(mix, TritonAttention())


def test_a_window_that_holds_everything_changes_no_bit() -> None:
    spans = ((0, 33), (70, 1), (5, 9), (700, 1))
    whole = PagedCase(Mix(spans=spans)).run(TritonAttention())
    for window, is_equal in ((701, True), (700, False)):
        cut = PagedCase(Mix(spans=spans, window=window)).run(TritonAttention())
        assert torch.equal(cut, whole) == is_equal


def test_a_cap_that_no_score_comes_near_changes_little_and_a_small_one_much() -> None:
    """The largest of these scores is about 4."""
    spans = ((0, 33), (70, 1), (700, 1))
    whole = PagedCase(Mix(spans=spans)).run(TritonAttention())
    wide, narrow = (
        PagedCase(Mix(spans=spans, softcap=softcap)).run(TritonAttention())
        for softcap in (1e3, 0.3)
    )
    assert (wide - whole).abs().max() < 1e-3
    assert (narrow - whole).abs().max() > 0.1


def test_scores_far_beyond_the_cap_are_the_cap_and_not_nan() -> None:
    """All that are positive then count the same, all that are negative nothing beside them."""
    case = PagedCase(Mix(spans=((40, 1),), softcap=40.0))
    case.q = case.q * 1e30
    out_TND = case.run(TritonAttention())
    assert out_TND.isfinite().all()
    close(out_TND, case.truth())


def test_what_lies_before_the_window_is_not_read() -> None:
    case = PagedCase(Mix(spans=((40, 1),), window=10))
    expected = case.run(TritonAttention())
    hidden = torch.arange(31)
    blocks, slots = case.blocks[0][hidden // 16], hidden % 16
    case.k[blocks, slots], case.v[blocks, slots] = torch.nan, torch.nan
    assert torch.equal(case.run(TritonAttention()), expected)
    case.v[case.blocks[0][31 // 16], 31 % 16] += 1.0
    assert not torch.equal(case.run(TritonAttention()), expected)


def test_nan_stays_with_its_request() -> None:
    case = PagedCase(Mix(spans=((0, 5), (20, 1))))
    expected = case.run(TritonAttention())
    case.k[case.blocks[0][0], 2] = torch.nan
    poisoned = case.run(TritonAttention())
    assert poisoned[2:5].isnan().all()
    assert torch.equal(poisoned[5:], expected[5:])


def test_layers_of_one_batch_share_its_tables_and_the_next_batch_has_its_own() -> None:
    attention = TritonAttention()
    first, second = (PagedCase(Mix(spans=spans)) for spans in (((0, 9), (50, 1)), ((7, 1),)))
    context = first.context()
    for case_context in (context, context):
        out = attention(first.q, first.k, first.v, case_context, first.scale)
        close(out, first.truth())
    close(second.run(attention), second.truth())
    close(first.run(attention), first.truth())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_kv_of_eight_bits_is_widened(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    spans = ((0, 33), (70, 1), (600, 1))
    check_attention(Mix(spans=spans, dtype=dtype, kv_dtype=kv_dtype), TritonAttention())


def test_very_long_heads_are_the_references() -> None:
    for softcap in (None, 2.0):
        mix = Mix(spans=((0, 5), (20, 1)), head_dim=288, softcap=softcap)
        check_attention(mix, TritonAttention())
