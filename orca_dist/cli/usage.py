"""The command line to a command object, by tyro; what is wrong with it in one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from orca_dist.cli.knobs import near, refuse_by_name
from orca_dist.errors import ConfigError

DESCRIPTION = "Serve language models over a pipeline of stages. --version prints the version."
RULE = re.compile(r"^─+$")
FLAG = re.compile(r"^--[\w-]+")
UNKNOWN_WORD = re.compile(r"Unrecognized options: ([^-,\s][^,]*)")  # a word, not a flag
NO_NUMBER = re.compile(  # by int() or float(), whatever else the flag would take
    r"Error parsing (--[\w-]+): .*"
    r"(?:(?P<whole>invalid literal for int\(\) with base 10)|could not convert string to float): "
    r"(['\"])(?P<value>.*)\3"
)
SUBCOMMANDS = "Available subcommands: "
MARKERS = (
    tyro.conf.CascadeSubcommandArgs,  # model fetch --log-level debug
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.EnumChoicesFromValues,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.PositionalMetavarFromFieldName,
)


def parse(commands: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    """The one of `commands` that is named, with its flags applied.

    None where help was asked for, and has been printed.
    Raises ConfigError with one line that names what is wrong and near flags.
    """
    _check_name(commands, arguments)
    for word in arguments:
        if word.startswith("--"):
            refuse_by_name(word.partition("=")[0])
    kinds = [Annotated[type(c), subcommand(name, default=c)] for name, c in commands.items()]
    kind: Any = reduce(or_, kinds)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                prog="orca-dist",
                description=DESCRIPTION,
                args=list(arguments),
                config=MARKERS,
            )
    except SystemExit as stop:
        if not stop.code:
            return None
        raise ConfigError(_one_line(complaint.getvalue())) from None


def _check_name(commands: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """A first word that is no flag has to be a command."""
    word = next(iter(arguments), "-")
    if not word.startswith("-") and word not in commands:
        raise ConfigError(_no_command(word, list(commands)))


def _no_command(word: str, known: Sequence[str]) -> str:
    return f"{word}: no such command{near(word, known)}; choose one of {', '.join(known)}"


def _one_line(box: str) -> str:
    """The first paragraph of tyro's box, and what it proposes instead."""
    first, *others = _paragraphs(box)
    message = _plainly(" ".join(first).rstrip("."))
    for paragraph in others:
        text = " ".join(paragraph)
        flags = [match[0] for line in paragraph if (match := FLAG.match(line))]
        if text.startswith("Perhaps you meant") and flags:
            message += f"; did you mean {' or '.join(dict.fromkeys(flags))}?"
        elif text.startswith(SUBCOMMANDS):
            if word := UNKNOWN_WORD.match(message):
                return _no_command(word[1], text.removeprefix(SUBCOMMANDS).split(", "))
            message += f"; {text}"
    return f"{message}; see orca-dist --help"


def _plainly(message: str) -> str:
    """What a number's flag needs, in place of what Python and tyro say of it."""
    if not (match := NO_NUMBER.fullmatch(message)):
        return message
    what = "a whole number" if match["whole"] else "a number"
    return f"{match[1]} {match['value']}: needs {what}"


def _paragraphs(box: str) -> list[list[str]]:
    """The box's lines without its frame, split at its rules."""
    paragraphs: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│╭╮╰╯ ")
        if RULE.match(text):
            paragraphs.append([])
        elif text and not line.startswith("╭"):
            paragraphs[-1].append(text)
    return [paragraph for paragraph in paragraphs if paragraph] or [["the command line is wrong"]]
