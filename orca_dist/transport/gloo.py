"""Links between CPU stages: gloo over TCP, bound to the stage's cluster address."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from orca_dist.transport.group import GroupChannel


def gloo_channel(
    store: dist.Store, *, member: int, host: str, timeout_s: float, max_pending: int
) -> GroupChannel:
    """Build this end of a link, which meets the other.

    `member` is 0 upstream and 1 downstream; `host` is this stage's own address.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    group = dist.ProcessGroupGloo(store, member, 2, options)
    return GroupChannel(group, member=member, max_pending=max_pending)
