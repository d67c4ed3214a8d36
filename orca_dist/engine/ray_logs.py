"""How Ray hands on what stages print: each line once, at once and as it was written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# Ray holds lines back that look alike, and puts the actor in front of each in colours, which
# breaks lines of JSON. Ours say node and stage themselves. Ray reads these as it is imported.
VARIABLES = {"RAY_DEDUP_LOGS": "0", "RAY_DISABLE_WORKER_LOG_PREFIX": "1"}


@contextlib.contextmanager
def plain_logs() -> Iterator[None]:
    """For the first import of ray; variables that are set already stay as they are."""
    added = VARIABLES.keys() - os.environ.keys()
    os.environ.update({name: VARIABLES[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
