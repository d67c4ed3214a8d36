"""A folder that appears whole or not at all: filled under a hidden name, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orca_dist.errors import ModelError

PARTIAL_SUFFIX = ".partial"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`; it becomes `target` if the body succeeds.

    Whatever ends the body early removes it. Raises ModelError where `target` is taken,
    or where the disk refuses (full, read-only).
    """
    partial = _partial_of(target)
    try:
        check_free(target)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise disk_error(target, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(target: Path) -> None:
    """Raises ModelError if something is in the way of `target`."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise ModelError(f"{target} exists already: remove it, or name another target")


def remove_leftovers(target: Path) -> None:
    """Removes what killed processes left of `target`; the caller must hold its lock."""
    for partial in target.parent.glob(f".{target.name}.*{PARTIAL_SUFFIX}"):
        shutil.rmtree(partial, ignore_errors=True)


def disk_error(target: Path, error: OSError) -> ModelError:
    """What the disk said, as a message about `target`."""
    if error.errno == errno.ENOSPC:
        return ModelError(f"{target} can't be written: the disk is full; free space and try again")
    return ModelError(f"{target} can't be written: {error}")


def _partial_of(target: Path) -> Path:
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}.{unique}{PARTIAL_SUFFIX}")
