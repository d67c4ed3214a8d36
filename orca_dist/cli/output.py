"""stdout and stderr: results to the one, everything else to the other."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

SCHEMA = 1


def print_json(document: Mapping[str, object]) -> None:
    """One document on stdout, as --json promises."""
    print(json.dumps({"schema": SCHEMA, **document}, ensure_ascii=False))


@contextlib.contextmanager
def results_only() -> Iterator[TextIO]:
    """The real stdout; whatever else this process and its children print goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(stdout, "w", encoding="utf-8", closefd=False) as results:
            yield results
    finally:
        sys.stdout.flush()  # what was printed meanwhile, before the real one is back
        os.dup2(stdout, 1)
        os.close(stdout)


@contextlib.contextmanager
def count_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; yields a function that takes how many are
    done, and of how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
