"""A model's folder that the driver sees and a stage doesn't, as on nodes without a shared disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from orca_dist.bootstrap import StageBootstrap
from orca_dist.engine.engine import Engine
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.engine.stages import OnDeath
from orca_dist.errors import StartupError
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import local_config


class WithoutFolder(LocalPlacement):
    """Places whose disk lacks `folder`: it goes once the driver has looked at it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def launch(self, bootstraps: Sequence[StageBootstrap], on_death: OnDeath) -> None:
        self._folder.rename(self._folder.with_name("elsewhere"))
        super().launch(bootstraps, on_death)


def test_the_error_names_node_and_path_before_stages_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given as a relative path, which each process would read in its own way: told whole."""
    folder = loud_llama(tmp_path / "model", num_layers=2)
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    with pytest.raises(StartupError) as caught:
        Engine.start(
            Path("model"),
            local_config(2),
            on_progress=told.append,
            placement=WithoutFolder(folder),
        )
    assert re.fullmatch(
        rf"stage [01] \(pid \d+, node \S+\) did not start: the model's folder {folder} is not on "
        r"this node: put it there under the same path, .*; or give an id of the Hub",
        str(caught.value),
    )
    assert told[-1] == "loading weights"
