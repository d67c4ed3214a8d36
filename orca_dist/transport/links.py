"""A stage's two links, made at the start of an epoch in one fixed order.

Every stage makes the link to its predecessor first, then the one to its
successor: the chain forms from stage 0 on and can't wait in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from orca_dist.device.seam import Device
from orca_dist.transport.channel import Channel
from orca_dist.transport.gloo import gloo_channel
from orca_dist.transport.group import DOWNSTREAM, UPSTREAM, GroupChannel
from orca_dist.transport.host import HostChannel
from orca_dist.transport.nccl import nccl_channel
from orca_dist.transport.rendezvous import pair_store

OnMade = Callable[[Channel], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """`kind` is gloo, nccl or host; `host` is this stage's cluster address."""

    kind: str
    stage: int
    num_stages: int
    host: str
    device: Device
    timeout_s: float
    max_pending: int


def open_links(
    config: LinkConfig, store: dist.Store, epoch: int, on_made: OnMade = lambda channel: None
) -> tuple[Channel | None, Channel | None]:
    """The links to the previous and the next stage; None at the pipeline's ends.

    `on_made` hears of each before it is first used: from then on it can be aborted.
    """
    stage = config.stage
    has_previous, has_next = stage > 0, stage < config.num_stages - 1
    previous = (
        _make(config, pair_store(store, epoch, stage - 1), DOWNSTREAM, on_made)
        if has_previous
        else None
    )
    following = (
        _make(config, pair_store(store, epoch, stage), UPSTREAM, on_made) if has_next else None
    )
    return previous, following


def _make(config: LinkConfig, store: dist.Store, member: int, on_made: OnMade) -> Channel:
    """One end of a link, proven with a dummy tensor."""
    channel = _group_channel(config, store, member)
    on_made(channel)
    on_device = config.kind == "nccl"
    channel.greet(torch.zeros(1, device=config.device.torch_device if on_device else "cpu"))
    if config.kind == "host":
        return HostChannel(channel, config.device, max_pending=config.max_pending)
    return channel


def _group_channel(config: LinkConfig, store: dist.Store, member: int) -> GroupChannel:
    if config.kind == "nccl":
        return nccl_channel(
            store, member=member, timeout_s=config.timeout_s, max_pending=config.max_pending
        )
    return gloo_channel(
        store,
        member=member,
        host=config.host,
        timeout_s=config.timeout_s,
        max_pending=config.max_pending,
    )
