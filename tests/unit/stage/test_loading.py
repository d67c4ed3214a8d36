"""While a stage reads its weights it says how far it is, and the master adds all stages up."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.core import split_layers
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.engine.pipeline import Pipeline
from orca_dist.proto.v1 import control_pb2 as pb
from orca_dist.stage.worker import StageWorker
from orca_dist.weights.progress import load_progress
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import stage_setup
from tests.unit.engine.test_settle import settled


def test_a_stage_tells_the_bytes_of_its_own_tensors(tmp_path: Path) -> None:
    folder = loud_llama(tmp_path / "loud")
    told: list[tuple[int, int]] = []
    setup = stage_setup(folder, 1, split_layers(5, 3), "float32")
    loaded = StageWorker(host="127.0.0.1").load(
        setup, lambda done, total: told.append((done, total))
    )
    done = [each for each, _ in told]
    assert done == sorted(set(done))
    assert {total for _, total in told} == {done[-1]} == {loaded.weight_bytes}


def test_the_master_adds_all_stages_up() -> None:
    pipeline = Pipeline(settled(stages=2, device="cpu"), LocalPlacement())
    told: list[tuple[int, int]] = []
    pipeline._on_load = lambda done, total: told.append((done, total))
    for stage, done, total in [(0, 10, 100), (1, 5, 50), (0, 100, 100), (1, 50, 50)]:
        progress = pb.LoadProgress(done_bytes=done, total_bytes=total)
        pipeline._note((stage, pb.StageMessage(load_progress=progress)))
    assert told == [(10, 100), (15, 150), (105, 150), (150, 150)]


def test_the_bar_appears_with_the_first_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with load_progress("loading"):
        pass
    assert capsys.readouterr().err == ""
    with load_progress("loading") as on_load:
        on_load(500_000, 2_000_000)
        on_load(2_000_000, 2_000_000)
    shown = capsys.readouterr()
    assert "loading" in shown.err
    assert "2.0/2.0 MB" in shown.err
    assert shown.out == ""
