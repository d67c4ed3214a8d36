"""Links between GPU stages: NCCL. Two ends on one GPU are refused by NCCL itself.

A lost neighbour must not take this process and its weights along, so NCCL's own
watchdog reaction is switched off (TORCH_NCCL_ASYNC_ERROR_HANDLING=0, set before
the group is made) and a stuck group is aborted instead.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from orca_dist.transport.group import GroupChannel

log = logging.getLogger(__name__)


class NcclChannel(GroupChannel):
    """A GroupChannel whose kernels can be ended: one that waits for its peer holds up a stream."""

    def abort(self) -> None:
        group = self._group
        if group is not None:
            try:
                group.abort()
            except RuntimeError as error:
                log.warning("a link can't be aborted: %s", error)

    def close(self) -> None:
        self.abort()  # before tensors are dropped: nothing comes into them afterwards
        super().close()


def nccl_channel(
    store: dist.Store, *, member: int, timeout_s: float, max_pending: int
) -> NcclChannel:
    """This end of a link on the current device; its communicator is made by the first tensor."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroupNCCL(store, member, 2, options)
    return NcclChannel(group, member=member, max_pending=max_pending)
