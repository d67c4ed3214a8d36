"""Log lines say where they come from, as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError
from orca_dist.logs import CHATTY, LineFormatter, Origin, about_request, set_up_logging


@pytest.fixture
def restored_levels() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, CHATTY)]
    levels, handlers = [logger.level for logger in loggers], root.handlers[:]
    root.handlers.clear()  # set_up_logging closes those it finds
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def line(log_format: str, origin: Origin, *, error: bool = False) -> str:
    formatter = LineFormatter(LogConfig(log_format=log_format).log_format, origin)  # type: ignore[arg-type]
    try:
        raise ValueError("broken") if error else KeyError
    except (ValueError, KeyError):
        info = sys.exc_info() if error else None
    record = logging.LogRecord("orca_dist.x", logging.INFO, __file__, 1, "%d left", (3,), info)
    record.created, record.msecs = 0.25, 250
    return formatter.format(record)


def test_text() -> None:
    origin = Origin(node="n1", stage=2, epoch=1)
    with about_request("r7"):
        text = line("text", origin)
    assert text == (
        "1970-01-01T00:00:00.250Z INFO orca_dist.x [node=n1 stage=2 epoch=1 request=r7]: 3 left"
    )
    assert "request" not in line("text", origin)


def test_json_is_one_object_a_line() -> None:
    with about_request("r7"):
        text = line("json", Origin(node="n1", stage=0), error=True)
    assert "\n" not in text
    document = json.loads(text)
    assert document["traceback"].endswith("ValueError: broken")
    del document["traceback"]
    assert document == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "orca_dist.x",
        "message": "3 left",
        "node": "n1",
        "stage": 0,
        "request": "r7",
    }


@pytest.mark.parametrize(
    ("level", "theirs", "ours"),
    [
        ("debug", logging.WARNING, logging.DEBUG),
        ("info", logging.WARNING, logging.INFO),
        ("error", logging.ERROR, logging.ERROR),
    ],
)
def test_libraries_do_not_join_in_our_debug_lines(
    level: str, theirs: int, ours: int, restored_levels: None
) -> None:
    set_up_logging(LogConfig(log_level=level), Origin(node="n1"))  # type: ignore[arg-type]
    assert logging.getLogger("grpc._cython.cygrpc").getEffectiveLevel() == theirs
    assert logging.getLogger("asyncio").getEffectiveLevel() == theirs
    assert logging.getLogger("orca_dist.x").getEffectiveLevel() == ours


def test_origin_keeps_up() -> None:
    origin = Origin(node="n1", stage=1)
    assert "epoch" not in line("text", origin)
    origin.epoch = 4
    assert "epoch=4" in line("text", origin)


def test_request_ids_stay_in_their_thread() -> None:
    other: list[str] = []
    with about_request("mine"):
        thread = threading.Thread(target=lambda: other.append(line("text", Origin(node="n"))))
        thread.start()
        thread.join()
    assert "mine" not in other[0]


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="log_level = loud: must be one of debug, info"):
        LogConfig(log_level="loud")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="log_format = xml: must be one of text, json"):
        LogConfig(log_format="xml")  # type: ignore[arg-type]
