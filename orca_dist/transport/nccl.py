"""Links between GPU stages: NCCL. Two ends on one GPU are refused by NCCL itself.

A lost neighbour must not take this process and its weights along. So what torch does to a process
whose link is stuck is switched off before the group is made (TORCH_NCCL_ASYNC_ERROR_HANDLING and
TORCH_NCCL_ENABLE_MONITORING, both 0), and a stuck group is aborted instead. While a communicator is
still being made, which its first tensor does, an abort has no effect.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from orca_dist.transport.group import GroupChannel

log = logging.getLogger(__name__)

ABORT_LIMIT_S = 30.0  # what is stuck for longer is left alone


class NcclChannel(GroupChannel):
    """A GroupChannel whose kernels can be ended: one that waits for its peer holds up a stream.

    An abort may wait for the whole device, and so for the abort of another link: each has a
    thread of its own.
    """

    def __init__(self, group: Any, *, member: int, max_pending: int) -> None:
        super().__init__(group, member=member, max_pending=max_pending)
        self._aborting: threading.Thread | None = None
        self._lock = threading.Lock()

    def abort(self) -> None:
        """Begins it; close() gives it time to end."""
        with self._lock:
            if self._aborting is None:
                self._aborting = threading.Thread(target=_abort, args=[self._group], daemon=True)
                self._aborting.start()

    def close(self) -> None:
        self.abort()
        assert self._aborting is not None
        self._aborting.join(ABORT_LIMIT_S)  # before tensors are dropped: nothing comes into them
        super().close()


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("a link can't be aborted: %s", error)


def nccl_channel(
    store: dist.Store, *, member: int, timeout_s: float, max_pending: int
) -> NcclChannel:
    """This end of a link on the current device; its communicator is made by the first tensor."""
    group = nccl_group(store, member=member, size=2, timeout_s=timeout_s)
    return NcclChannel(group, member=member, max_pending=max_pending)


def nccl_group(store: dist.Store, *, member: int, size: int, timeout_s: float) -> Any:
    """That ends its process for nothing: see above."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True  # not one of those that a device may get for copies
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, member, size, options)
