"""Several answers at once, as lines of a pipe and as blocks of a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import pytest
from rich.console import Console

from orca_dist.cli.answers import Answer, LineView, answer_view, results_console
from orca_dist.cli.interrupts import Interrupted, interruptible


def _piped() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=40), out


def _say(view: LineView, answer: Answer, text: str, ending: str = "") -> None:
    answer.text += text
    answer.ending = ending
    view.show(answer)


def test_lines_are_printed_whole_behind_their_letters() -> None:
    console, out = _piped()
    view = LineView(console)
    a, b = Answer(prompt="one?", letter="A"), Answer(prompt="[b]two?", letter="B")
    _say(view, a, "Hel")
    _say(view, b, "1.")
    _say(view, a, "lo.\n\nMore")
    _say(view, b, " [i]x", ending="2 tokens, stop")
    _say(view, a, "", ending="3 tokens, length")
    assert out.getvalue().splitlines() == [
        "A > one?",
        "B > [b]two?",
        "A | Hello.",
        "B | 1. [i]x",
        "B   (2 tokens, stop)",
        "A | More",
        "A   (3 tokens, length)",
    ]


def test_long_lines_are_broken_at_words_and_lose_nothing() -> None:
    console, out = _piped()
    words = " ".join(f"word{i}" for i in range(60)) + " " + "x" * 200
    _say(LineView(console), Answer(prompt="?", letter="A"), words, ending="done")
    lines = [line[4:] for line in out.getvalue().splitlines() if line.startswith("A | ")]
    assert max(len(line) for line in lines) <= 96
    assert "".join(lines).replace(" ", "") == words.replace(" ", "")


def test_blocks_fill_up_in_place_in_order_of_arrival() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, height=40, force_terminal=True, color_system=None)
    answers = [Answer(prompt="late?"), Answer(prompt="early?", letter="A", text="[yes]")]
    with answer_view(console, answers) as view:
        answers[0].letter, answers[0].text = "B", "no"
        view.show(answers[0])
    last = out.getvalue().split("╭")[-2:]
    assert [("early?" in block, "late?" in block) for block in last] == [
        (True, False),
        (False, True),
    ]
    assert "[yes]" in last[0]
    assert "no" in last[1]


def test_a_pipe_gets_a_wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert results_console(io.StringIO()).width == 120
    monkeypatch.setenv("COLUMNS", "90")
    assert results_console(io.StringIO()).width == 90


def test_a_signal_cancels_the_work_and_lets_it_end() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    with pytest.raises(Interrupted) as interrupted:
        asyncio.run(interruptible(work()))
    assert interrupted.value.exit_code == 143
    assert ended == ["work"]
    assert asyncio.run(interruptible(asyncio.sleep(0, "result"))) == "result"
