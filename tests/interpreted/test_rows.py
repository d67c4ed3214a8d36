"""The Triton kernels of each row, step by step on the CPU, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orca_kernels import Activation, reference
from orca_kernels.triton import rows

from tests.fixtures.kernel_cases import (
    CPU,
    DTYPES,
    RowMix,
    check_add_norm,
    check_gate,
    check_norm,
    check_rotation,
    noise,
    row_mixes,
)

tables = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=20)
@given(mix=row_mixes, table_dtype=tables)
def test_any_rows(mix: RowMix, table_dtype: torch.dtype) -> None:
    check_norm(mix, rows.rms_norm)
    check_add_norm(mix, rows.add_rms_norm)
    check_gate(mix, rows.gate_mul)
    check_rotation(mix, rows.rotate_and_write, table_dtype)


@pytest.mark.slow
@settings(max_examples=60)
@given(mix=row_mixes, table_dtype=tables)
def test_many_rows(mix: RowMix, table_dtype: torch.dtype) -> None:
    check_norm(mix, rows.rms_norm)
    check_add_norm(mix, rows.add_rms_norm)
    check_gate(mix, rows.gate_mul)
    check_rotation(mix, rows.rotate_and_write, table_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 576, 1536, 4096, 5120, 16384])
def test_norm_of_any_size(dtype: torch.dtype, size: int) -> None:
    x_TH = 3 * noise(9, size, dtype=dtype, device=CPU)
    weight_H = noise(size, dtype=dtype, device=CPU, seed=1)
    got = rows.rms_norm(x_TH, weight_H, 1e-6)
    wanted = reference.rms_norm(x_TH, weight_H, 1e-6)
    torch.testing.assert_close(got, wanted)


def test_norm_rounds_before_or_after_its_weight() -> None:
    x_TH = noise(64, 64, dtype=torch.float16, device=CPU)
    weight_H = noise(64, dtype=torch.float16, device=CPU, seed=1)
    late = rows.rms_norm(x_TH, weight_H, 1e-6, rounds_late=True)
    early = rows.rms_norm(x_TH, weight_H, 1e-6)
    assert not torch.equal(late, early)
    assert torch.equal(late, rows.rms_norm(x_TH.float(), weight_H.float(), 1e-6).half())


def test_a_weight_and_one_is_summed_in_float32() -> None:
    """In float16 1 + 0.0004 would be 1."""
    x_TH, weight_H = noise(8, 64, dtype=torch.float16, device=CPU), torch.full((64,), 4e-4).half()
    got = rows.rms_norm(x_TH, weight_H, 1e-6, rounds_late=True, adds_one=True)
    assert torch.equal(got, rows.rms_norm(x_TH.float(), weight_H.float() + 1.0, 1e-6).half())
    assert not torch.equal(got, rows.rms_norm(x_TH, torch.ones(64).half(), 1e-6))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x_TH, weight_H = noise(70, 96, dtype=torch.bfloat16, device=CPU), torch.ones(96).bfloat16()
    whole = rows.rms_norm(x_TH, weight_H, 1e-6)
    assert torch.equal(rows.rms_norm(x_TH[41:42], weight_H, 1e-6), whole[41:42])


@pytest.mark.parametrize("activation", Activation)
def test_the_gate_of_large_values_is_not_nan(activation: Activation) -> None:
    gate_up_TF = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]])
    gated_TF = rows.gate_mul(gate_up_TF, activation)
    torch.testing.assert_close(gated_TF, torch.tensor([[0.0, 600.0, 0.0]]))


def test_nan_stays_in_its_row() -> None:
    x_TH = noise(9, 64, dtype=torch.float32, device=CPU)
    x_TH[4, 5] = torch.nan
    gated = [rows.gate_mul(x_TH, activation) for activation in Activation]
    for result in (rows.rms_norm(x_TH, torch.ones(64), 1e-6), *gated):
        assert result[4].isnan().any()
        assert not result[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()
