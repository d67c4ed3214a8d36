"""Several answers that arrive at once, shown to a person: side by side, or line by line.

A terminal gets one block per request that fills up in place; a file or pipe gets
every line once it is complete, behind its request's letter. Knows no client.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orca_dist.metrics.pipeline_view import color

TWO_COLUMNS_WIDTH = 110  # from here on two blocks fit beside each other
PIPE_WIDTH = 120
LINE_LEN = 96
REFRESH_HZ = 8


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request and what has come back; `letter` is empty until it has arrived there."""

    prompt: str
    letter: str = ""
    text: str = ""
    ending: str = ""


class AnswerView(Protocol):
    """Is told of every piece of text, after it was added to its answer."""

    def show(self, answer: Answer) -> None: ...


def results_console(results: TextIO) -> Console:
    """A console on `results` that is wide enough for pictures where no terminal limits it."""
    known = results.isatty() or "COLUMNS" in os.environ
    return Console(file=results, width=None if known else PIPE_WIDTH)


@contextmanager
def answer_view(console: Console, answers: Sequence[Answer]) -> Iterator[AnswerView]:
    """The view that suits the console; complete when the block ends."""
    if not console.is_terminal:
        yield LineView(console)
        return
    view = BlockView(answers)
    with Live(view, console=console, refresh_per_second=REFRESH_HZ):
        yield view


@dataclass(frozen=True, slots=True)
class BlockView:
    """One panel a request, in as many columns as there is room for; rich redraws it in time."""

    answers: Sequence[Answer]

    def show(self, answer: Answer) -> None:
        """Nothing to do: the next drawing shows it."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        num_columns = 2 if options.max_width >= TWO_COLUMNS_WIDTH else 1
        grid = Table.grid(expand=True)
        for _ in range(num_columns):
            grid.add_column(ratio=1)
        in_order = sorted(self.answers, key=lambda answer: answer.letter or "~")
        panels = [_panel(answer) for answer in in_order]
        for first in range(0, len(panels), num_columns):
            grid.add_row(*panels[first : first + num_columns])
        yield grid


def _panel(answer: Answer) -> Panel:
    hue = color(answer.letter) if answer.letter else "default"
    title = Text.assemble((f" {answer.letter or '·'} ", f"reverse {hue}"), f" {answer.prompt} ")
    return Panel(
        Text(answer.text),
        title=title,
        title_align="left",
        subtitle=Text(answer.ending, style="dim"),
        subtitle_align="right",
        border_style=hue,
    )


@dataclass(slots=True)
class LineView:
    """Prints `A | text`, a line at a time."""

    console: Console
    _shown: dict[str, int] = field(default_factory=dict)  # characters, by letter

    def show(self, answer: Answer) -> None:
        if answer.letter not in self._shown:
            self._shown[answer.letter] = 0
            self._print(answer, f"> {answer.prompt}")
        while line := self._next_line(answer):
            self._shown[answer.letter] += len(line)
            if text := line.strip():
                self._print(answer, f"| {text}")
        if answer.ending:
            self._print(answer, f"  ({answer.ending})")

    def _next_line(self, answer: Answer) -> str:
        """The next complete line with its end; the rest, once the answer has ended."""
        rest = answer.text[self._shown[answer.letter] :]
        head, newline, _ = rest[:LINE_LEN].partition("\n")
        if newline:
            return head + newline
        if len(rest) > LINE_LEN:
            return rest[: rest.rfind(" ", 1, LINE_LEN) + 1] or rest[:LINE_LEN]
        return rest if answer.ending else ""

    def _print(self, answer: Answer, text: str) -> None:
        line = Text(f"{answer.letter} {text}")
        self.console.print(line, soft_wrap=True)
