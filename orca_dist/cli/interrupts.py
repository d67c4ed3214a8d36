"""SIGINT and SIGTERM: an exception while a command works, a callback while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], None] | signal.Handlers
T = TypeVar("T")


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


async def interruptible(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; a signal cancels it and, once it has ended, raises Interrupted."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    signums: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        signums.append(signum)
        loop.call_soon_threadsafe(task.cancel)

    with handling(on_signal):
        try:
            return await task
        except asyncio.CancelledError:
            if signums:
                raise Interrupted(signums[0]) from None
            raise
