"""Waiting with a bound, in tasks that may have been cancelled already.

asyncio.timeout is not for those before Python 3.11.4: in a task once cancelled it
raises CancelledError where its time is up, and what should follow never runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def wait_at_most(work: Coroutine[Any, Any, object], timeout_s: float) -> None:
    """Until `work` has ended; after `timeout_s` seconds it is cancelled instead."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=timeout_s)
    if task.done():
        task.result()
    else:
        task.cancel()
