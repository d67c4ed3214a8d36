"""What a stage says that it is doing, to the watch over hangs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from orca_dist.device.seam import Device
from orca_dist.device.staging import download
from orca_dist.stage import worker as worker_module
from orca_dist.stage.trace import StagePhase
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import load_stages, mixed_plans, run_stage


def test_the_wait_for_the_device_is_a_phase_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last stage, where its tokens are awaited: what keeps them may be another stage."""
    first, last = load_stages(loud_llama(tmp_path), 2)
    phases: list[StagePhase] = []

    def noting(device: Device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        phases.append(last.trace.progress.phase)
        return download(device, tensors)

    monkeypatch.setattr(worker_module, "download", noting)
    for plan in mixed_plans():
        for stage in (first, last):
            run_stage(stage, plan)
            assert stage.trace.progress.phase is StagePhase.IDLE
    assert phases == [StagePhase.AWAITING] * 2
