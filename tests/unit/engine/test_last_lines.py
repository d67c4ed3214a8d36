"""The last lines of a dead stage: how many, which, and where they are if not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.engine.last_lines import NUM_LAST_LINES, tell_end_of_file, tell_last_lines


def test_the_end_of_a_long_file_without_foreign_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "worker.err"
    lines = [f"line {number}" for number in range(20_000)]
    path.write_text("\n".join([*lines, ":job_id:01", "gr\udcfcn"]), "utf-8", "surrogateescape")
    tell_end_of_file(2, "10.0.0.7", path, without=(":job_id:", ":actor_name:"))
    (message,) = caplog.messages
    first, *rest = message.splitlines()
    assert first == "the last lines of stage 2:"
    assert rest == [*lines[1 - NUM_LAST_LINES :], "gr\ufffdn"]


def test_a_file_of_another_machine_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "worker-4b60-7.err"
    tell_end_of_file(2, "10.0.0.7", path)
    assert caplog.messages == [f"the last lines of stage 2 are on node 10.0.0.7, in {path}"]


def test_who_said_nothing_is_not_quoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "worker.err").write_text(":job_id:01\n")
    tell_end_of_file(0, "here", tmp_path / "worker.err", without=(":job_id:",))
    tell_last_lines(0, [])
    assert caplog.messages == []
