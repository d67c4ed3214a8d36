"""A bar of requests on stderr, for simulations that take long enough to need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def request_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of the requests done and in all.

    The bar appears at its first call, and only on a terminal.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

    def update(done: int, total: int) -> None:
        if not bars.tasks:
            bars.add_task(title)
            bars.start()
        bars.update(bars.task_ids[0], completed=done, total=total)

    try:
        yield update
    finally:
        if bars.tasks:
            bars.stop()
