"""Writes docs/api.md from the comments of protos/v1/generate.proto; --check only compares.

Reads the subset of the proto language that the file uses: one declaration a line,
comments above it or behind it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "protos" / "v1" / "generate.proto"
PAGE = ROOT / "docs" / "api.md"

OPEN = re.compile(r"(service|message|enum) (\w+) \{(\})?$")
RPC = re.compile(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);$")
FIELD = re.compile(r"(?:(optional|repeated) )?(\w+) (\w+) = (\d+);$")
VALUE = re.compile(r"(\w+) = (\d+);$")

HEAD = """\
# The gRPC service

Generated from `protos/v1/generate.proto` by `python scripts/docs_api.py`; a test keeps it so.

The server also answers `grpc.health.v1.Health` and `grpc.reflection.v1alpha.ServerReflection`.
A call that fails carries a `google.rpc.Status`: see [errors](errors.md).
"""


@dataclass(slots=True)
class Block:
    """A service, message or enum; each row is the cells of one declaration."""

    kind: str
    name: str
    comment: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


def blocks(text: str) -> tuple[str, list[Block]]:
    """The comment at the head of the file, and its blocks in their order."""
    head, found, comment = "", [], []
    for line in map(str.strip, text.splitlines()):
        code, _, behind = (part.strip() for part in line.partition("//"))
        if not code:
            comment = [*comment, behind] if line else []
            continue
        words = " ".join([*filter(None, comment), *filter(None, [behind])])
        comment = []
        if code.startswith("syntax"):
            head = words
        elif match := OPEN.match(code):
            found.append(Block(match[1], match[2], words))
        elif code != "}" and not code.startswith("package"):
            found[-1].rows.append(_cells(code, words))
    return head, found


def _cells(code: str, comment: str) -> tuple[str, ...]:
    if match := RPC.match(code):
        answer = f"stream of `{match[4]}`" if match[3] else f"`{match[4]}`"
        return (f"`{match[1]}`", f"`{match[2]}`", answer, comment)
    if match := FIELD.match(code):
        return (f"`{match[3]}`", " ".join(filter(None, match.group(1, 2))), match[4], comment)
    if match := VALUE.match(code):
        return (f"`{match[1]}`", match[2], comment)
    raise ValueError(f"{PROTO.name} has a line that this script can't read: {code}")


COLUMNS = {
    "service": ("call", "request", "answer", "meaning"),
    "message": ("field", "type", "number", "meaning"),
    "enum": ("value", "number", "meaning"),
}


def page() -> str:
    """The whole of docs/api.md."""
    head, found = blocks(PROTO.read_text(encoding="utf-8"))
    return "\n".join([HEAD, head, *(line for block in found for line in _section(block))]) + "\n"


def _section(block: Block) -> Iterator[str]:
    title = f"orca.v1.{block.name}" if block.kind == "service" else block.name
    yield from ("", f"## {title}")
    if block.comment:
        yield from ("", block.comment)
    if block.rows:
        columns = COLUMNS[block.kind]
        yield from ("", _row(columns), "|---" * len(columns) + "|", *map(_row, block.rows))
    elif not block.comment:
        yield from ("", "Empty.")


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/api.md differs from the proto: run scripts/docs_api.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
