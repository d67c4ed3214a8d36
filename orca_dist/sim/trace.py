"""Workloads from files: JSON with {"requests": [...]}, JSONL or CSV with one request a line.

The same four names everywhere: `prompt` (a list of token ids, a text, or a length)
and `out` (tokens to generate) have to be there; `id` is the place in the file and
`at_s` (seconds after the start) is 0 where they are absent. What is wrong is named
by its line, or its place in the list.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import MAX_LEN
from orca_dist.sim.workload import Prompt, Workload, WorkloadRequest, in_order, is_time

NAMES = ("id", "prompt", "out", "at_s")
Places = Iterator[tuple[str, object]]  # where in the file, and what is there


def read_workload(path: Path, *, clients: int | None = None) -> Workload:
    """The requests of a file, in order of arrival; raises ConfigError naming file and line."""
    if path.suffix not in READERS:
        raise ConfigError(
            f"{path}: the name of a workload ends in {', '.join(READERS)}; rename the file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    found = READERS[path.suffix](path, text)
    requests = [_request(where, values, index) for index, (where, values) in enumerate(found)]
    if not requests:
        raise ConfigError(f"{path}: has no requests; give it at least one")
    return in_order(requests, clients)


def _json(path: Path, text: str) -> Places:
    document = _loads(str(path), text)
    requests = document.get("requests") if isinstance(document, dict) else None
    if not isinstance(requests, list):
        raise ConfigError(f'{path}: needs {{"requests": [...]}}, a list of requests')
    for index, values in enumerate(requests):
        yield f"{path}: requests[{index}]", values


def _jsonl(path: Path, text: str) -> Places:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}: line {number}"
            yield where, _loads(where, line)


def _csv(path: Path, text: str) -> Places:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    for row in _rows(path, rows):
        where = f"{path}: line {rows.line_num}"
        if None in row or None in row.values():
            raise ConfigError(f"{where}: needs {len(rows.fieldnames or [])} values, as the head")
        yield where, {name: _cell(value) for name, value in row.items() if value}


def _rows(path: Path, rows: csv.DictReader[str]) -> Iterator[dict[str | None, str | None]]:
    """A row's values by the head's names; what is beyond is under None, what lacks is None."""
    try:
        yield from rows
    except csv.Error as error:
        raise ConfigError(f"{path}: line {rows.line_num}: is not CSV: {error}") from None


READERS: dict[str, Callable[[Path, str], Places]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
}


def _loads(where: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from None


def _cell(text: str) -> object:
    """A number or a list where it reads like one, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _request(where: str, values: object, index: int) -> WorkloadRequest:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: needs an object with {', '.join(NAMES)}")
    for name in values:
        if name not in NAMES:
            raise ConfigError(f"{where}: {name}: no such name; choose from {', '.join(NAMES)}")
    at_s, given_id = values.get("at_s", 0.0), values.get("id", index)
    if not is_time(at_s):
        raise ConfigError(f"{where}: at_s = {at_s!r}: needs seconds after the start, 0 or more")
    if not isinstance(given_id, int | str) or isinstance(given_id, bool):
        raise ConfigError(f"{where}: id = {given_id!r}: needs a whole number or a text")
    return WorkloadRequest(
        id=given_id,
        prompt=_prompt(where, values.get("prompt")),
        out=_count(where, "out", values.get("out")),
        at_s=float(at_s),
    )


def _prompt(where: str, value: object) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    return _count(where, "prompt", value, "a length, a text or a list of token ids")


def _count(where: str, name: str, value: object, what: str = "a whole number") -> int:
    if type(value) is not int or not 1 <= value <= MAX_LEN:
        raise ConfigError(f"{where}: {name} = {value!r}: needs {what}, from 1 to {MAX_LEN}")
    return value
