"""Links between GPU stages that NCCL can't join: device -> host -> gloo -> host -> device.

gloo takes no CUDA tensors and NCCL no two members on one GPU; this serves both. Copies go by pinned
memory on a stream for each direction, and a thread of the sending end waits for them: the compute
thread goes on to the next plan while this one's output is still being computed.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from orca_dist.device.seam import Device, Event
from orca_dist.transport.channel import Arrival, Channel, LinkError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArrival:
    """On the host first, then on the device. `free`: what x was used for before is over."""

    inner: Arrival
    device: Device
    staging_TH: torch.Tensor
    x_TH: torch.Tensor
    free: Event

    def wait(self) -> None:
        self.inner.wait()
        with self.device.inbound():
            self.free.wait()
            self.x_TH.copy_(self.staging_TH, non_blocking=True)
            copied = self.device.record()
        copied.wait()


class HostChannel:
    """Wraps a channel of CPU tensors; its ends may live on any device.

    A send that fails is told of by those after it: the next, or the one for which more than
    `max_pending` would be on their way, and all from then on. None of them goes out.
    """

    def __init__(self, inner: Channel, device: Device, *, max_pending: int) -> None:
        self._inner = inner
        self._device = device
        self._max_pending = max_pending
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="link-sender")
        self._pending: deque[Future[None]] = deque()
        self._bytes_sent = 0
        self._broken: Exception | None = None
        self._closed = False

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def send(self, x_TH: torch.Tensor) -> None:
        if self._closed:
            raise LinkError("the link is closed")
        self._pending.append(self._sender.submit(self._forward, *self._copied(x_TH)))
        self._bytes_sent += x_TH.numel() * x_TH.element_size()
        while self._pending and (self._pending[0].done() or self._is_full):
            self._pending.popleft().result()

    def post_recv(self, x_TH: torch.Tensor) -> HostArrival:
        staging_TH = self._device.pinned(x_TH.shape, x_TH.dtype)
        return HostArrival(
            inner=self._inner.post_recv(staging_TH),
            device=self._device,
            staging_TH=staging_TH,
            x_TH=x_TH,
            free=self._device.record(),
        )

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._closed = True
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._inner.close()

    @property
    def _is_full(self) -> bool:
        return len(self._pending) > self._max_pending

    def _copied(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """x on its way to the host, behind what the current stream computes it by."""
        computed = self._device.record()
        staging_TH = self._device.pinned(x_TH.shape, x_TH.dtype)
        with self._device.outbound():
            computed.wait()
            staging_TH.copy_(x_TH, non_blocking=True)
            self._device.hold(x_TH)
            return staging_TH, self._device.record()

    def _forward(self, staging_TH: torch.Tensor, copied: Event) -> None:
        """The sending thread's part."""
        copied.synchronize()
        if self._broken is not None:
            raise self._broken
        try:
            self._inner.send(staging_TH)
        except LinkError as error:
            self._broken = error
            raise
