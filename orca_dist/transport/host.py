"""Links between GPU stages that NCCL can't join: device -> host -> gloo -> host -> device.

gloo takes no CUDA tensors and NCCL no two members on one GPU; this serves both.
"""

from __future__ import annotations

import torch

from orca_dist.transport.channel import Channel


class HostChannel:
    """Wraps a channel of CPU tensors; its ends may live on any device."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent

    def send(self, x_TH: torch.Tensor) -> None:
        self._inner.send(x_TH.to("cpu"))

    def recv(self, x_TH: torch.Tensor) -> None:
        staging = torch.empty_like(x_TH, device="cpu", pin_memory=x_TH.is_cuda)
        self._inner.recv(staging)
        x_TH.copy_(staging)

    def close(self) -> None:
        self._inner.close()
