"""Links between GPU stages: NCCL. Two ends on one GPU are refused by NCCL itself.

A lost neighbour must not take this process and its weights along, so NCCL's own
watchdog reaction is switched off (TORCH_NCCL_ASYNC_ERROR_HANDLING=0, set before
the group is made) and a stuck group is aborted instead.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from orca_dist.transport.group import GroupChannel


class NcclChannel(GroupChannel):
    """A GroupChannel whose close() aborts what still waits on the device."""

    def close(self) -> None:
        group = self._group
        super().close()
        if group is not None:
            group.abort()


def nccl_channel(
    store: dist.Store, *, member: int, device: torch.device, timeout_s: float, max_pending: int
) -> NcclChannel:
    """Build this end of a link on `device` and prove it with a dummy tensor."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroupNCCL(store, member, 2, options)
    channel = NcclChannel(group, member=member, max_pending=max_pending)
    channel.greet(torch.zeros(1, device=device))
    return channel
