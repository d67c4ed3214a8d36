"""The Triton kernels of experts, step by step on the CPU, against the torch definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from orca_kernels import Activation
from orca_kernels.triton.experts import NARROW, TritonExperts, tile_rows

from tests.fixtures.expert_cases import ExpertCase, ExpertMix, check_experts, expert_mixes
from tests.fixtures.kernel_cases import DTYPES

ONE_ROW = ExpertMix(num_rows=1, num_experts=8, num_chosen=2)
ALL_TO_ONE = ExpertMix(num_rows=37, num_experts=5, num_chosen=1, lean=100.0)
FULL_TILES = ExpertMix(num_rows=2 * NARROW, num_experts=2, num_chosen=2)


@settings(max_examples=20)
@given(mix=expert_mixes())
@example(mix=ONE_ROW)
@example(mix=ALL_TO_ONE)
@example(mix=FULL_TILES)
def test_any_mix(mix: ExpertMix) -> None:
    check_experts(mix, TritonExperts)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=30)
@given(mix=expert_mixes(100))
def test_many_mixes(mix: ExpertMix) -> None:
    check_experts(mix, TritonExperts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_tiles(dtype: torch.dtype) -> None:
    mix = ExpertMix(num_rows=150, num_experts=3, num_chosen=2, dtype=dtype)
    sizes = {"num_experts": 3, "itemsize": dtype.itemsize}
    assert tile_rows(num_pairs=300, **sizes) > tile_rows(num_pairs=48, **sizes) == NARROW
    check_experts(mix, TritonExperts)


def test_experts_that_nobody_chose_are_in_no_sum() -> None:
    """Experts without rows hold NaN."""
    case = ExpertCase(replace(ONE_ROW, num_rows=3))
    chosen = set(case.expert_TK.flatten().tolist())
    unused = [expert for expert in range(8) if expert not in chosen]
    assert unused
    wanted = case.truth()
    case.gate_up_EFH[unused] = case.down_EHF[unused] = torch.nan
    torch.testing.assert_close(case.run(TritonExperts), wanted, atol=3e-5, rtol=3e-5)


def test_nan_stays_in_its_row() -> None:
    case = ExpertCase(replace(ALL_TO_ONE, num_rows=20))
    case.x_TH[7, 3] = torch.nan
    is_nan_T = case.run(TritonExperts).isnan().any(-1)
    assert is_nan_T.nonzero().flatten().tolist() == [7]


def test_choices_are_added_up_in_their_order_in_float32() -> None:
    """The first is so small that it would be seen only if it came last."""
    case = ExpertCase(ExpertMix(num_rows=1, num_experts=3, num_chosen=3))
    experts = TritonExperts(case.gate_up_EFH, case.down_EHF, Activation.SILU)
    order, weight_TK = (0, 2, 2), torch.tensor([[1e-3, 2.0**24, -(2.0**24)]])
    y_KH = torch.cat(
        [experts(case.x_TH, torch.tensor([[each]]), torch.ones(1, 1)) for each in order]
    )
    by_hand_H = torch.zeros(48)
    for weight, y_H in zip(weight_TK[0], y_KH, strict=True):
        by_hand_H += weight * y_H
    got_TH = experts(case.x_TH, torch.tensor([order]), weight_TK)
    assert torch.equal(got_TH[0], by_hand_H)
    assert not torch.equal(got_TH[0], 1e-3 * y_KH[0])
