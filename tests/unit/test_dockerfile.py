"""The Dockerfile: what the linter says, and that it agrees with the package around it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

from orca_dist.client import healthcheck
from orca_dist.config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Word and arguments of each, with lines joined and comments left out."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest) for word, _, rest in (line.partition(" ") for line in text.split("\n")) if word
    ]


def of_word(wanted: str) -> list[str]:
    return [rest for word, rest in instructions() if word == wanted]


def test_the_linter_finds_nothing() -> None:
    places = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    linter = shutil.which("hadolint", path=places)
    assert linter is not None, "make setup installs it"
    done = subprocess.run(
        [linter, "--no-color", str(FILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_runs_as_nobody_special_from_then_on() -> None:
    words = [word for word, _ in instructions()]
    assert of_word("USER") == ["10001:10001"]
    assert "RUN" not in words[words.index("USER") :]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {name for rest in of_word("COPY") for name in rest.split()[:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    assert "*" in lines


def test_what_the_package_is_made_of_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {path.split("/")[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    named = {project["project"]["readme"], *project["project"]["license-files"]}
    copied = {name for rest in of_word("COPY") for name in rest.split()[:-1]}
    assert folders | named <= copied
    assert re.search(r"extra='\[gpu\]'", FILE.read_text())
    assert "gpu" in project["project"]["optional-dependencies"]


def test_its_python_is_new_enough() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (default,) = (
        rest.removeprefix("PYTHON_VERSION=")
        for rest in of_word("ARG")
        if rest.startswith("PYTHON_VERSION=")
    )
    lowest = project["requires-python"].removeprefix(">=")
    assert [int(part) for part in default.split(".")] >= [int(part) for part in lowest.split(".")]


def test_its_health_check_is_the_clients_own() -> None:
    (rest,) = of_word("HEALTHCHECK")
    assert json.loads(rest[rest.index("[") :]) == ["python", "-m", healthcheck.__name__]
    assert of_word("EXPOSE") == [str(ServerConfig().port)]
