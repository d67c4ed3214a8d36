"""stdout and stderr: results to the one, everything else to the other."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
SCHEMA = 1


def print_json(document: Mapping[str, object]) -> None:
    """One document on stdout, as --json promises."""
    print(json.dumps({"schema": SCHEMA, **document}, ensure_ascii=False))


def set_up_logging(config: LogConfig) -> None:
    """Log lines go to stderr, from the level of `config` on."""
    if config.log_level not in LEVELS:
        raise ConfigError(f"log_level = {config.log_level}: choose one of {', '.join(LEVELS)}")
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


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
