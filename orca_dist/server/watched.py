"""What files say, read anew when they change. A change that can't be read alters nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from orca_dist.errors import ConfigError

T = TypeVar("T")
Stamp = tuple[int, int, int]  # of a file: inode, size, when it was written

log = logging.getLogger(__name__)


class Watched(Generic[T]):
    """Of any thread. `read` makes the value of `paths`, or raises ConfigError."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Raises what `read` does."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamps = _stamps(self._paths)  # before the reading: what comes after is a change
        self._value = read()

    def get(self) -> T:
        """The value of the files as they are; what they were, while they are at fault."""
        with self._lock:
            stamps = _stamps(self._paths)
            if stamps != self._stamps:
                self._stamps = stamps
                self._renew()
            return self._value

    def _renew(self) -> None:
        files = " and ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except ConfigError as error:
            log.error("%s changed, but what was read before stays in force: %s", files, error)
        else:
            log.info("%s changed, and is in force", files)


def _stamps(paths: Sequence[Path]) -> list[Stamp | None]:
    return [_stamp(path) for path in paths]


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
