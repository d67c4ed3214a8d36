"""The files around the package agree with each other and with the package.

Links resolve, commands that the pages name exist, pins fit the declared bounds,
stubs fit the oldest gRPC promised, and nothing names the machine that it was
written on.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE_SPAN = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def _project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _requirements() -> list[Requirement]:
    """Those of the package and its dev extra, without triton: a CUDA build of torch pins that."""
    project = _project()
    lines = project["dependencies"] + project["optional-dependencies"]["dev"]
    return [each for each in map(Requirement, lines) if each.name != "triton"]


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def _lower_bound(name: str) -> str:
    (requirement,) = (r for r in _requirements() if r.name == name)
    (bound,) = (s.version for s in requirement.specifier if s.operator == ">=")
    return bound


def _files(folder: Path, ignored: list[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or any(fnmatch(path.name, pattern) for pattern in ignored):
            continue
        if path.is_dir():
            yield from _files(path, ignored)
        else:
            yield path


def _repository_files() -> Iterator[Path]:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    return _files(ROOT, [".git", *ignored])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    prose = CODE_SPAN.sub("", page.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    assert [t for t in local if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_named_in_pages_exist(page: Path) -> None:
    spans = " ".join(CODE_SPAN.findall(page.read_text()))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", spans))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named - targets == set()


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert {"make demo", "make test"} <= set(readme.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_pages_exist(page: Path) -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]+)`", page.read_text())
    made = (".venv/", "path/", "org/")  # org/name: an id of the Hub
    assert [n for n in named if not n.startswith(made) and not (ROOT / n).exists()] == []


def test_every_declared_package_is_pinned_within_its_bounds() -> None:
    pins = _pins()
    unfit = [
        str(requirement)
        for requirement in _requirements()
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
        or canonicalize_name(requirement.name) not in pins
    ]
    assert unfit == []


def test_pins_are_exact_and_name_no_build() -> None:
    assert [v for v in _pins().values() if not re.fullmatch(r"[0-9][0-9a-z.]*", v)] == []


def test_stubs_are_made_for_the_oldest_promised_grpc() -> None:
    stubs = sorted((ROOT / "orca_dist/proto/v1").glob("*_pb2_grpc.py"))
    made_for = {re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", s.read_text())[0] for s in stubs}
    assert made_for == {f"{_lower_bound('grpcio')}.0"}


def test_stubs_are_made_for_the_oldest_promised_protobuf() -> None:
    stubs = sorted((ROOT / "orca_dist/proto/v1").glob("*_pb2.py"))
    made_for = {re.findall(r"Protobuf Python Version: ([\d.]+)", s.read_text())[0] for s in stubs}
    assert made_for == {_lower_bound("protobuf")}


# Spelt in parts, so that this file doesn't name them either.
FORBIDDEN = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "download.py" + "torch.org",
    "npm" + "js.org",
    "ana" + "conda.org",
    "crates" + ".io",
    "/wo" + "rk/main",
    "/wo" + "rk/shared",
    "/wo" + "rk/.",
    "/ro" + "ot/",
    "/tmp/" + "helper",
]


def test_no_file_names_a_registry_or_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in _repository_files()
        for text in [path.read_text(errors="replace")]
        for word in FORBIDDEN
        if word in text
    ]
    assert found == []
