"""The Triton kernel that samples, step by step on the CPU: the very tokens of the book."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from orca_kernels.triton.sample import sample

from tests.fixtures.sample_cases import (
    EDGES,
    ENDS,
    ONE_BEFORE,
    How,
    SampleCase,
    check_sample,
    large_case,
    sample_cases,
)

# A tie at the cut that goes through three pieces of 16, and is cut in the second.
LONG_TIE = SampleCase(
    num_ids=48,
    kinds=("equal",),
    hows=tuple(How(top_k=24, number=number) for number in (0.0, 0.4, 0.7, ONE_BEFORE)),
)
columns = st.sampled_from([1, 16, 64])


@settings(max_examples=30)
@given(case=sample_cases(max_ids=60), max_columns=columns)
@example(case=LONG_TIE, max_columns=16)
@example(case=ENDS, max_columns=16)
@example(case=EDGES, max_columns=16)
def test_any_case(case: SampleCase, max_columns: int) -> None:
    check_sample(case, partial(sample, max_columns=max_columns))


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=200)
@given(case=sample_cases(max_ids=200), max_columns=columns)
def test_many_cases(case: SampleCase, max_columns: int) -> None:
    check_sample(case, partial(sample, max_columns=max_columns))


@pytest.mark.slow
@pytest.mark.timeout(600)  # 70 s for the larger one
@pytest.mark.parametrize("num_ids", [49_152, 128_256])
def test_a_whole_vocabulary(num_ids: int) -> None:
    check_sample(large_case(num_ids), sample)


def test_pieces_as_they_are_launched() -> None:
    check_sample(large_case(9_000), sample)
