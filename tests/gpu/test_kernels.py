"""The Triton kernels on a GPU, against the torch reference: the same mixes as when interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orca_kernels import Kernels, kernels_for
from orca_kernels.dispatch import TORCH
from orca_kernels.triton.experts import TritonExperts

from tests.fixtures.expert_cases import ExpertCase, ExpertMix, check_experts, expert_mixes
from tests.fixtures.kernel_cases import (
    DTYPES,
    Mix,
    PagedCase,
    RowMix,
    check_add_norm,
    check_attention,
    check_gate,
    check_norm,
    check_rotation,
    check_same_bits_alone,
    mixes,
    row_mixes,
)
from tests.fixtures.sample_cases import (
    SampleCase,
    check_sample,
    large_case,
    sample_cases,
    table,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # every head size and dtype is compiled once
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
HEAD_DIMS = (64, 80, 128, 256)
MIXED = Mix(spans=((0, 33), (70, 1), (5, 9), (0, 1), (1100, 1), (600, 4)))


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """A stage's; that they are Triton's is part of what is tested."""
    made = kernels_for(CUDA, torch.bfloat16, 1)
    assert made.name == "triton"
    return made


def attention_of(mix: Mix) -> None:
    """By new kernels, since they serve one model each."""
    check_attention(mix, kernels_for(CUDA, mix.dtype, 1).paged_attention, CUDA)


@settings(max_examples=150)
@given(mix=mixes(max_start=300, head_dims=HEAD_DIMS))
def test_any_mix(mix: Mix) -> None:
    attention_of(mix)


@settings(max_examples=60)
@given(mix=mixes(max_start=20_000, head_dims=(128,)))
def test_long_mixes(mix: Mix) -> None:
    attention_of(mix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (600, None), (600, 0.3)])
def test_long_contexts_are_split_and_merged(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    spans = ((1500, 1), (700, 20), (1300, 2), (3, 1), (40_000, 1))
    attention_of(Mix(spans=spans, heads=(8, 1), dtype=dtype, window=window, softcap=softcap))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (40, 2.0)])
def test_a_request_has_the_same_bits_alone_or_batched(
    kernels: Kernels, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    """In attention alone: matmuls are not ours."""
    mix = replace(MIXED, dtype=dtype, window=window, softcap=softcap)
    check_same_bits_alone(mix, kernels.paged_attention, CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_batch_has_the_same_bits_again(kernels: Kernels, dtype: torch.dtype) -> None:
    case = PagedCase(replace(MIXED, dtype=dtype), CUDA)
    first = case.run(kernels.paged_attention)
    assert all(torch.equal(case.run(kernels.paged_attention), first) for _ in range(10))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_kv_of_eight_bits_is_widened(kv_dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability(CUDA) < (8, 9):
        pytest.skip("this GPU has no such type")
    attention_of(Mix(spans=MIXED.spans, dtype=torch.bfloat16, kv_dtype=kv_dtype))


def test_no_launch_waits_for_the_device(kernels: Kernels) -> None:
    """A read of device data on the host raises here; so would a copy from pageable memory."""
    case = PagedCase(replace(MIXED, dtype=torch.bfloat16), CUDA)
    expected = case.run(kernels.paged_attention)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = case.run(kernels.paged_attention)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


@settings(max_examples=100)
@given(mix=row_mixes, table_dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_rows(kernels: Kernels, mix: RowMix, table_dtype: torch.dtype) -> None:
    check_norm(mix, kernels.rms_norm, CUDA)
    check_add_norm(mix, kernels.add_rms_norm, CUDA)
    check_gate(mix, kernels.gate_mul, CUDA)
    check_rotation(mix, kernels.rotate_and_write, table_dtype, CUDA)


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (64, 8), (128, 8)])
def test_rows_of_large_models(kernels: Kernels, heads: tuple[int, int]) -> None:
    mix = RowMix(num_rows=300, heads=heads, head_dim=128, dtype=torch.bfloat16, flag=True)
    check_norm(mix, kernels.rms_norm, CUDA)
    check_add_norm(mix, kernels.add_rms_norm, CUDA)
    check_gate(mix, kernels.gate_mul, CUDA)
    check_rotation(mix, kernels.rotate_and_write, torch.bfloat16, CUDA)


@settings(max_examples=100)
@given(mix=expert_mixes(600))
def test_any_experts(mix: ExpertMix) -> None:
    check_experts(mix, TritonExperts, CUDA)


LARGE_MIXTURE = ExpertMix(
    num_rows=2000, num_experts=128, num_chosen=8, hidden=2048, width=768, dtype=torch.bfloat16
)


@pytest.mark.parametrize("num_rows", [1, 16, 300, 2000])
def test_experts_of_large_models(num_rows: int) -> None:
    check_experts(replace(LARGE_MIXTURE, num_rows=num_rows), TritonExperts, CUDA)


def test_no_choice_of_experts_is_waited_for() -> None:
    """And the same rows have the same bits again."""
    case = ExpertCase(replace(LARGE_MIXTURE, num_rows=100), CUDA)
    expected = case.run(TritonExperts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = case.run(TritonExperts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, expected)


@settings(max_examples=300)
@given(case=sample_cases(max_ids=10_000))
def test_any_tokens(kernels: Kernels, case: SampleCase) -> None:
    """The very same as on the CPU: multiply and add are not fused."""
    check_sample(case, kernels.sample, CUDA)
    check_sample(case, TORCH.sample, CUDA)


@pytest.mark.parametrize("num_ids", [49_152, 128_256, 262_144])
def test_tokens_of_large_vocabularies(kernels: Kernels, num_ids: int) -> None:
    check_sample(large_case(num_ids), kernels.sample, CUDA)


def test_no_token_is_waited_for(kernels: Kernels) -> None:
    """By Triton's kernel and by torch's operations; once each is warm."""
    case = large_case(49_152)
    logits_NV, table_RP = case.make_logits().to(CUDA), table(case.hows).to(CUDA)
    for sample in (kernels.sample, TORCH.sample):
        expected = sample(logits_NV, table_RP)
        torch.cuda.set_sync_debug_mode("error")
        try:
            tokens_R = sample(logits_NV, table_RP)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(tokens_R, expected)
