"""A bar of bytes on stderr for the slow steps that a person waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes done since its last call."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total_bytes)
        yield lambda num_bytes: bars.advance(task, num_bytes)
