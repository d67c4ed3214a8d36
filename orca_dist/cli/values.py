"""Values of settings as a field's type, from text (variables) or from YAML."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from cattrs import Converter

from orca_dist.config import Split, Switch

NUMBERS = tuple[int, ...]
SPLIT = tuple[int | Split, ...]
WORDS = tuple[str, ...]


def text_reader() -> Converter:
    """Reads values written as text: `8`, `0.5`, `8 7 7 8`."""
    reader = _reader()
    reader.register_structure_hook(int, lambda text, _: _number(int, text, "a whole number"))
    reader.register_structure_hook(float, lambda text, _: _number(float, text, "a number"))
    reader.register_structure_hook_func(
        lambda kind: kind == NUMBERS,
        lambda text, _: tuple(reader.structure(word, int) for word in text.split()),
    )
    reader.register_structure_hook_func(
        lambda kind: kind == SPLIT,
        lambda text, _: tuple(
            _split_part(int(word) if word.isdecimal() else word) for word in text.split()
        ),
    )
    reader.register_structure_hook_func(
        lambda kind: kind == WORDS, lambda text, _: tuple(text.split())
    )
    return reader


def yaml_reader() -> Converter:
    """Reads values that have a type already, and converts none but int to float."""
    reader = _reader()
    reader.register_structure_hook(int, lambda value, _: _typed(int, value, "a whole number"))
    reader.register_structure_hook(Switch, _switch)
    reader.register_structure_hook(str, lambda value, _: _typed(str, value, "a text; quote it"))
    reader.register_structure_hook(
        float, lambda value, _: float(_typed(int | float, value, "a number"))
    )
    reader.register_structure_hook_func(
        lambda kind: kind == NUMBERS,
        lambda value, _: tuple(
            reader.structure(item, int) for item in _typed(list, value, "a list")
        ),
    )
    reader.register_structure_hook_func(
        lambda kind: kind == SPLIT,
        lambda value, _: tuple(
            _split_part(item)
            for item in ([value] if isinstance(value, str) else _typed(list, value, "a list"))
        ),
    )
    reader.register_structure_hook_func(
        lambda kind: kind == WORDS,
        lambda value, _: tuple(
            reader.structure(item, str) for item in _typed(list, value, "a list")
        ),
    )
    return reader


def _reader() -> Converter:
    reader = Converter(detailed_validation=False)
    reader.register_structure_hook(StrEnum, _choice)
    return reader


def _switch(value: object, kind: type[Switch]) -> StrEnum:
    """YAML reads a plain on, off, yes or no as a truth."""
    return (
        _choice("on" if value else "off", kind) if isinstance(value, bool) else _choice(value, kind)
    )


def _split_part(value: object) -> int | Split:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if value not in list(Split):
        raise ValueError("needs auto, even, or whole numbers")
    return Split(value)


def _choice(value: object, kind: type[StrEnum]) -> StrEnum:
    choices = [member.value for member in kind]
    if value not in choices:
        raise ValueError(f"choose one of {', '.join(choices)}")
    return kind(value)


def _typed(kind: Any, value: Any, what: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"needs {what}")
    return value


def _number(kind: Callable[[str], Any], text: str, what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"needs {what}") from None
