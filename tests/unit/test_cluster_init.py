"""`orca-dist cluster init`: whole folders, written once, over nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.cli.main import main
from orca_dist.cli.settings import load_settings
from orca_dist.cli.templates import TEMPLATES, kinds

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", kinds())
def test_what_is_written_is_what_the_repository_has(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / kind
    assert main(["cluster", "init", kind, str(target)]) == 0
    written = [path for path in target.rglob("*") if not path.is_dir()]
    assert written
    assert not any(path.is_symlink() for path in written)
    assert {str(path) for path in written} == set(capsys.readouterr().out.split())
    for path in written:
        source = ROOT / "cluster" / kind / path.relative_to(target)
        assert path.read_bytes() == source.read_bytes()
        assert path.stat().st_mode == source.stat().st_mode


@pytest.mark.parametrize("more", [[], ["--help"]])
def test_the_kinds_are_named_where_none_is_given(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["cluster", "init", *more])
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"Kind of cluster: {', '.join(kinds()[:-1])} or {kinds()[-1]}." in said


def test_the_slurm_script_is_the_one_in_launch(tmp_path: Path) -> None:
    assert main(["cluster", "init", "slurm", str(tmp_path)]) == 0
    script = (ROOT / "launch" / "slurm.sbatch").read_bytes()
    assert (tmp_path / "slurm.sbatch").read_bytes() == script


def test_the_settings_are_settings() -> None:
    settings = load_settings({}, TEMPLATES / "orca.yaml")
    settings.engine.check()
    settings.server.check()


def test_nothing_is_written_over_or_beside_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "orca.yaml"
    mine.write_text("stages: 4\n")
    assert main(["cluster", "init", "slurm", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {mine}: there already, and not overwritten")
    assert list(tmp_path.iterdir()) == [mine]
    assert mine.read_text() == "stages: 4\n"


def test_a_link_to_nowhere_is_there_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "orca.yaml").symlink_to(tmp_path / "nowhere")
    assert main(["cluster", "init", "slurm", str(tmp_path)]) == 2
    assert "there already" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_an_unknown_kind_names_the_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "init", "slrm", str(tmp_path / "x")]) == 2
    err = capsys.readouterr().err
    assert "slrm: no such kind; did you mean slurm?" in err
    assert err.rstrip().endswith(", ".join(kinds()))
    assert not (tmp_path / "x").exists()


def test_a_folder_that_can_not_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["cluster", "init", "slurm", str(tmp_path / "file" / "x")]) == 2
    err = capsys.readouterr().err
    assert "can't be written: Not a directory" in err
    assert "Traceback" not in err
