"""A link by way of host memory, whose sends go out behind the caller's back."""

from __future__ import annotations

import torch

from orca_dist.device.cpu import CpuDevice
from orca_dist.transport.channel import LinkError
from orca_dist.transport.host import HostChannel
from orca_dist.transport.loopback import LoopbackChannel


class BrokenOnce(LoopbackChannel):
    """Fails its first send, and would take all others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tried = 0

    def send(self, x_TH: torch.Tensor) -> None:
        self.num_tried += 1
        if self.num_tried == 1:
            raise LinkError("the cable was pulled")


def is_refused(channel: HostChannel) -> bool:
    try:
        channel.send(torch.zeros(1))
    except LinkError as error:
        return str(error) == "the cable was pulled"
    return False


def test_nothing_goes_out_after_a_send_that_failed() -> None:
    """What came next would be taken for what was lost."""
    inner = BrokenOnce()
    channel = HostChannel(inner, CpuDevice(), max_pending=1)
    refused = [is_refused(channel) for _ in range(6)]
    channel.close()
    assert all(refused[2:])
    assert inner.num_tried == 1
