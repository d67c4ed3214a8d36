"""A GGUF file, opened: its metadata by key and its tensors by name. Reads nothing eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor

from orca_dist.errors import ModelError


class GgufFile:
    """Metadata and memory-mapped tensors; raises ModelError naming the file if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self.tensors: Mapping[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a scalar, a str or a list of them."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    @property
    def architecture(self) -> str:
        """Its own name for the model's kind, which begins the names of the model's keys."""
        return str(self.get("general.architecture"))

    def need(self, key: str) -> Any:
        """As `get`; raises ModelError where the key is missing."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: the metadata key {key} is missing")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A size or count; raises ModelError where it is missing without a default, or not one."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.path}: {key} = {value!r}: needs a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """As `count`, of a float32."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {key} = {value!r}: needs a number")
        return shortest(value)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, outermost dimension first (GGUF lists it last)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))


def shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(
            f"{path} is cut short or not a GGUF file ({error}): download it again"
        ) from None
