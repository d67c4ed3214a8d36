"""Log lines, as text or as JSON, each saying where it comes from.

A line names its node, and its stage, epoch and request where it has them. What a
prompt or an answer says is never logged. The only place that configures logging.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from orca_dist.config import LogConfig, LogFormat

CHATTY = ("asyncio", "grpc", "filelock", "httpx", "httpx2", "httpcore", "httpcore2")  # each step
_request_id: ContextVar[str] = ContextVar("request_id", default="")


@dataclass(slots=True, kw_only=True)
class Origin:
    """Where this process stands; its stage keeps the epoch up to date."""

    node: str = field(default_factory=socket.gethostname)
    stage: int | None = None
    epoch: int | None = None


def set_up_logging(config: LogConfig, origin: Origin) -> None:
    """Lines go to stderr, from the level of `config` on; earlier set-ups are replaced."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(config.log_format, origin))
    level: int = logging.getLevelNamesMapping()[config.log_level.upper()]
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


@contextlib.contextmanager
def about_request(request_id: str) -> Iterator[None]:
    """Lines that this task writes in the block carry the request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


class LineFormatter(logging.Formatter):
    """Time in UTC, level, logger, origin, message; a traceback follows or is a field."""

    converter = time.gmtime

    def __init__(self, log_format: LogFormat, origin: Origin) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s%(place)s: %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
        self._json = log_format is LogFormat.JSON
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields()
        if self._json:
            return json.dumps(self._document(record) | fields, ensure_ascii=False)
        text = " ".join(f"{name}={value}" for name, value in fields.items())
        record.place = f" [{text}]"
        return super().format(record)

    def _fields(self) -> dict[str, object]:
        origin = self._origin
        fields = {
            "node": origin.node,
            "stage": origin.stage,
            "epoch": origin.epoch,
            "request": _request_id.get() or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _document(self, record: logging.LogRecord) -> dict[str, object]:
        document: dict[str, object] = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return document
