"""The callers' keys: whose they are, from a file and from a variable.

Only digests are kept. No message, log line or repr shows a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orca_dist.credentials import KEY_RULE, is_key, read_secret
from orca_dist.errors import ConfigError

SETTING = "api_keys_file"
VARIABLE = "ORCA_API_KEYS"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
Entry = tuple[str, str]  # where it stands, and name:key


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """`names`: whose key it is, by its digest. A caller may have several keys."""

    names: Mapping[bytes, str]

    @classmethod
    def read(cls, path: Path | None, variable: str) -> Self:
        """The keys of a file and of a variable's value; raises ConfigError naming a bad line."""
        names: dict[bytes, str] = {}
        for where, text in (*_of_file(path), *_of_variable(variable)):
            name, key = _entry(where, text)
            if names.setdefault(_digest(key), name) != name:
                raise ConfigError(f"{where}: this key is another caller's already")
        return cls(names=names)

    def name_of(self, key: str) -> str | None:
        """Whose key it is. Takes the same time for every key that is not."""
        given, found = _digest(key), None
        for digest, name in self.names.items():
            if hmac.compare_digest(digest, given):
                found = name
        return found


def _of_file(path: Path | None) -> list[Entry]:
    if path is None:
        return []
    lines = read_secret(SETTING, path).decode(errors="replace").splitlines()
    numbered = ((number, line.strip()) for number, line in enumerate(lines, start=1))
    entries = [
        (f"{SETTING} = {path}, line {number}", line)
        for number, line in numbered
        if line and not line.startswith("#")
    ]
    if not entries:
        raise ConfigError(f"{SETTING} = {path}: holds no key; give a line name:key for each caller")
    return entries


def _of_variable(value: str) -> Iterator[Entry]:
    for number, word in enumerate(value.split(), start=1):
        yield f"{VARIABLE}, key {number}", word


def _entry(where: str, text: str) -> tuple[str, str]:
    name, colon, key = text.partition(":")
    if not (colon and NAME.fullmatch(name) and is_key(key)):
        raise ConfigError(
            f"{where}: needs name:key; a name is 1 to 64 letters, digits, dots, dashes and "
            f"underscores, a key {KEY_RULE}"
        )
    return name, key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The key in a call's `authorization: Bearer KEY`; "" where there is none."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, key = value.partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
    return ""
