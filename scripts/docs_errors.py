"""Writes docs/errors.md from the tree in orca_dist/errors.py; --check only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from orca_dist.errors import ERROR_DOMAIN, OrcaError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"

HEAD = f"""\
# Errors

Generated from `orca_dist/errors.py` by `python scripts/docs_errors.py`; a test keeps it so.

A failed call carries a `google.rpc.Status` (in the trailer `grpc-status-details-bin`):

- `google.rpc.ErrorInfo` with the code below as its `reason` and the domain `{ERROR_DOMAIN}`
- `google.rpc.BadRequest` with the field at fault, where the code is `invalid_request`
- `google.rpc.RetryInfo` with the time to wait, where the code is `queue_full`

Both Python clients raise the class of that code, from `orca_dist.errors`. A command prints
one line `error: ...` on stderr and ends with the exit code.

| code | class | gRPC status | exit code | meaning | fix |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole of docs/errors.md."""
    return HEAD + "".join(_row(kind) for kind in _tree(OrcaError))


def _tree(kind: type[OrcaError]) -> Iterator[type[OrcaError]]:
    """`kind` and all below it, in the order of the source."""
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == OrcaError.__module__:
            yield from _tree(below)


def _row(kind: type[OrcaError]) -> str:
    meaning = " ".join((kind.__doc__ or "").split())
    return (
        f"| `{kind.code}` | `{kind.__name__}` | `{kind.status}` | {kind.exit_code} "
        f"| {meaning} | {kind.fix} |\n"
    )


def main(arguments: list[str]) -> int:
    if "--check" not in arguments:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/errors.md differs from the code: run scripts/docs_errors.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
