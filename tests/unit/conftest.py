"""Shared by the unit tests: torch computes with one thread, unless a test sets more.

Files run side by side on all cores, and their tensors are small: more threads would wait for
each other longer than they compute. torch is imported by who runs tests, not by the process that
hands them out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
