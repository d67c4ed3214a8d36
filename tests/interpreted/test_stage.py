"""Whole stages on the Triton kernels, against the same stages on the torch reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from orca_kernels import Kernels
from orca_kernels.dispatch import MIN_CAPABILITY, TORCH, triton_kernels

from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.equivalence import noting_stages
from tests.fixtures.noting_stage import Rows
from tests.fixtures.thread_pipeline import mixed_plans, run_stage


def rows_of(folder: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """What comes out of two stages for prompts, and then for decodes beside more prompts."""
    monkeypatch.setattr(
        "orca_dist.stage.worker.kernels_for", lambda device, dtype, num_threads: kernels
    )
    stages = noting_stages(folder, 2)
    for plan in mixed_plans():
        for stage in stages:
            run_stage(stage, plan)
    return stages[-1].rows


@pytest.mark.slow
def test_a_mixed_batch_goes_through_both_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = loud_llama(tmp_path / "loud")
    expected = rows_of(folder, TORCH, monkeypatch)
    got = rows_of(folder, triton_kernels(MIN_CAPABILITY), monkeypatch)
    assert got.keys() == expected.keys()
    assert len(got) == 20 + 26
    for key, bits in got.items():
        ours, theirs = (np.frombuffer(row, np.float32) for row in (bits, expected[key]))
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-4)
