"""The Triton kernels in its interpreter against the reference: what is done to each row alone."""

from __future__ import annotations

import pytest

from tests.fixtures.interpreted import interpret

FILES = ["test_rows.py", "test_sample.py", "test_experts.py"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES)
def test_kernels_equal_the_reference_in_the_interpreter(file: str) -> None:
    interpret(file, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_more_of_the_same_in_the_interpreter(file: str) -> None:
    interpret(file, "slow")
