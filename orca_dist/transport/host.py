"""Links between GPU stages that NCCL can't join: device -> host -> gloo -> host -> device.

gloo takes no CUDA tensors and NCCL no two members on one GPU; this serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orca_dist.transport.channel import Arrival, Channel


@dataclass(frozen=True, slots=True)
class HostArrival:
    """On the host first, then on the device."""

    inner: Arrival
    staging_TH: torch.Tensor
    x_TH: torch.Tensor

    def wait(self) -> None:
        self.inner.wait()
        self.x_TH.copy_(self.staging_TH)


class HostChannel:
    """Wraps a channel of CPU tensors; its ends may live on any device."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent

    def send(self, x_TH: torch.Tensor) -> None:
        self._inner.send(x_TH.to("cpu"))

    def post_recv(self, x_TH: torch.Tensor) -> HostArrival:
        staging_TH = torch.empty_like(x_TH, device="cpu", pin_memory=x_TH.is_cuda)
        return HostArrival(self._inner.post_recv(staging_TH), staging_TH, x_TH)

    def close(self) -> None:
        self._inner.close()
