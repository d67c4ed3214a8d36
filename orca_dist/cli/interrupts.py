"""SIGINT and SIGTERM: an exception while a command works, a callback while it serves."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], None] | signal.Handlers


class Interrupted(BaseException):
    """A signal asked the command to end; no error, so nothing but `finally` stops it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A handler: raises Interrupted in the main thread."""
    raise Interrupted(signum)


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Both signals go to `handler` in this block; main thread only."""
    before = [signal.signal(signum, handler) for signum in SIGNALS]
    try:
        yield
    finally:
        for signum, old in zip(SIGNALS, before, strict=True):
            signal.signal(signum, old)
