"""What a model's name can mean: a folder, or a repository of the Hub at a commit.

A repository's files lie in the Hub's cache, in a folder whose path says which they are;
stages are told the repository and the commit, since another node's cache is another one.
Imports neither torch nor, unless a name is the Hub's, the Hub's library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from orca_dist.spec import ModelSpec
from orca_dist.weights.headers import Headers, check_headers, read_headers

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_HUB_MODEL = re.compile(rf"({_REPO_ID.pattern})@([0-9a-f]{{40}})")
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/([0-9a-f]{40})")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A repository at one commit: `str` of it is what stages are told."""

    repo: str
    commit: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}"


def is_repo_id(text: str) -> bool:
    """Whether `text` reads as org/name."""
    return _REPO_ID.fullmatch(text) is not None


def source_of(folder: Path) -> str:
    """What stages are told of a model whose config.json lies in `folder`."""
    model = hub_model(folder)
    return str(model or folder.resolve())


def source_name(source: str) -> str:
    """The model's name for people: org/name, or that of its folder."""
    match = _HUB_MODEL.fullmatch(source)
    return match[1] if match else Path(source).name


def parse_source(source: str) -> HubModel | None:
    """The repository that `source_of` named; None if it is a folder."""
    match = _HUB_MODEL.fullmatch(source)
    return HubModel(repo=match[1], commit=match[2]) if match else None


def hub_model(folder: Path) -> HubModel | None:
    """The repository whose snapshot `folder` is, in the cache that is in use; else None."""
    match = _SNAPSHOT.fullmatch("/".join(folder.absolute().parts[-3:]))
    if match is None:
        return None
    from orca_dist.weights.hub_files import cached_folder

    model = HubModel(repo=f"{match[1]}/{match[2]}", commit=match[3])
    return model if cached_folder(model).resolve() == folder.resolve() else None


def source_headers(folder: Path) -> Headers:
    """Of every tensor of a folder, or of a repository whose weights may not be here yet.

    Raises ModelError naming the file that is missing or damaged.
    """
    model = hub_model(folder)
    if model is None:
        return read_headers(folder)
    from orca_dist.weights.hub import read_hub_headers

    return read_hub_headers(model)


def check_source(folder: Path, spec: ModelSpec) -> Headers:
    """As source_headers; raises ModelError unless all are there in their right shapes."""
    headers = source_headers(folder)
    check_headers(headers, spec)
    return headers
