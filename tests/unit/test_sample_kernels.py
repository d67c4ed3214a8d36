"""Sampling on the CPU and in plain torch: the tokens of the book; weights that are powers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from orca_kernels import sample as reference
from orca_kernels.cpu import sample as cpu
from orca_kernels.dispatch import Sample

from tests.fixtures.sample_cases import (
    EDGES,
    ENDS,
    ONE_BEFORE,
    How,
    SampleCase,
    check_sample,
    large_case,
    sample_cases,
    scale,
    table,
)

BACKENDS = {"torch": reference.sample, "cpu": cpu.sample}
ALL_IN_TIE = SampleCase(
    num_ids=7,
    kinds=("equal",),
    hows=tuple(How(top_k=5, top_p=0.5, number=number) for number in (0.0, 0.3, 0.6, ONE_BEFORE)),
)


@pytest.fixture(params=BACKENDS)
def sample(request: pytest.FixtureRequest) -> Sample:
    return BACKENDS[request.param]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150)
@given(case=sample_cases())
@example(case=ALL_IN_TIE)
@example(case=ENDS)
@example(case=EDGES)
def test_any_case(backend: str, case: SampleCase) -> None:
    check_sample(case, BACKENDS[backend])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=2000)
@given(case=sample_cases(max_ids=400))
def test_many_cases(backend: str, case: SampleCase) -> None:
    check_sample(case, BACKENDS[backend])


@pytest.mark.parametrize("num_ids", [20_000, pytest.param(128_256, marks=pytest.mark.slow)])
def test_a_whole_vocabulary(sample: Sample, num_ids: int) -> None:
    check_sample(large_case(num_ids), sample)


def test_rows_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at a time as memory allows, and one if none."""
    case = large_case(300)
    for elements in (1, 900, 10**9):
        monkeypatch.setattr(reference, "PIECE_ELEMENTS", elements)
        check_sample(case, reference.sample)


def test_no_row_is_no_token(sample: Sample) -> None:
    check_sample(SampleCase(num_ids=5, hows=()), sample)


def test_logits_are_left_as_they_were(sample: Sample) -> None:
    logits_NV = large_case(300).make_logits()
    before = logits_NV.clone()
    sample(logits_NV, table([How(top_p=0.9), How(top_k=3), How(min_p=0.1), How()]))
    assert torch.equal(logits_NV, before)


# ---- weights -----------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_weights_are_probabilities(temperature: float) -> None:
    below = torch.linspace(0, 9, 20_001)
    got = reference.weights(below, scale(temperature)).double() / 2**reference.WEIGHT_BITS
    wanted = (-below.double() / temperature).exp()
    torch.testing.assert_close(got, wanted, rtol=4e-6, atol=2**-reference.WEIGHT_BITS)


def test_the_likeliest_token_weighs_one_and_none_weighs_more() -> None:
    below = torch.arange(0, 1 << 20).float() * 2.0**-20
    got = reference.weights(below, torch.tensor(1.0))
    assert got[0] == 2**reference.WEIGHT_BITS
    assert got.max() == 2**reference.WEIGHT_BITS
    halved = got.double() / (2.0**reference.WEIGHT_BITS * (-below.double()).exp2())
    assert (halved - 1).abs().max() < 2.0**-21.5


@pytest.mark.parametrize("below", [torch.inf, 3.4e38, 41.0])
def test_what_is_too_far_below_weighs_nothing(below: float) -> None:
    assert reference.weights(torch.tensor([below]), torch.tensor(1.0)).tolist() == [0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-3, 1.0, 1e9, 1e300])
def test_both_weigh_alike(temperature: float) -> None:
    """Bit for bit; what is impossible stays so at any temperature."""
    generator = torch.Generator().manual_seed(0)
    below = 40 * torch.rand(100_000, generator=generator) ** 3
    below[:3] = torch.tensor([0.0, torch.inf, 1e30])
    there = reference.weights(below, scale(temperature))
    with np.errstate(over="ignore"):
        here = cpu.weights(below.numpy().copy(), np.float32(scale(temperature)))
    assert torch.equal(there, torch.from_numpy(here))
    assert there[:2].tolist() == [2**reference.WEIGHT_BITS, 0]
