"""A folder that appears whole or not at all, on a disk that is really full."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.errors import ModelError
from orca_dist.weights.atomic import new_folder

FULL_DEVICE = Path("/dev/full")


def fill(target: Path) -> None:
    """A write that the kernel refuses for want of space, after one that works."""
    with new_folder(target) as folder:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        FULL_DEVICE.write_bytes(b"weights")


def test_a_full_disk_leaves_nothing_and_a_second_try_works(tmp_path: Path) -> None:
    target = tmp_path / "model"
    problem = r"model can't be written: the disk is full; free space and try again"
    with pytest.raises(ModelError, match=problem):
        fill(target)
    assert list(tmp_path.iterdir()) == []
    with new_folder(target) as folder:
        (folder / "config.json").write_text("{}", encoding="utf-8")
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
