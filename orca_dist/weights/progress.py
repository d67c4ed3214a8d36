"""A bar of bytes on stderr for the slow steps that a person waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes done since its last call."""
    with _bars() as bars:
        task = bars.add_task(title, total=total_bytes)
        yield lambda num_bytes: bars.advance(task, num_bytes)


@contextmanager
def load_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes the bytes done and in all; the bar appears at its first call."""
    bars = _bars()

    def update(done_bytes: int, total_bytes: int) -> None:
        if not bars.tasks:
            bars.add_task(title)
            bars.start()
        bars.update(bars.task_ids[0], completed=done_bytes, total=total_bytes)

    try:
        yield update
    finally:
        if bars.tasks:
            bars.stop()


def _bars() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
