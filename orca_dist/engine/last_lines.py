"""What a stage printed last: told by the driver when the stage dies, whatever killed it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

NUM_LAST_LINES = 50
TAIL_BYTES = 64 * 2**10  # of a file that may be long; holds so many lines of ordinary length


def tell_last_lines(stage: int, lines: Collection[str]) -> None:
    """Logs `lines`, the newest last; says nothing where there are none."""
    if lines:
        log.error("the last lines of stage %d:\n%s", stage, "\n".join(lines))


def tell_end_of_file(stage: int, node: str, path: Path, *, without: tuple[str, ...] = ()) -> None:
    """Logs the last lines of `path` on `node`, but those that begin with one of `without`.

    Says where they lie if this machine can't read them.
    """
    try:
        lines = _end_of_file(path)
    except OSError:
        log.error("the last lines of stage %d are on node %s, in %s", stage, node, path)
        return
    kept = [line for line in lines if not line.startswith(without)]
    tell_last_lines(stage, kept[-NUM_LAST_LINES:])


def _end_of_file(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
