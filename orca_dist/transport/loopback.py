"""A link inside one process, for stages that run as threads."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

import torch

from orca_dist.transport.channel import LinkError


@dataclass(frozen=True, slots=True)
class LoopbackArrival:
    """Takes what was sent when it is waited for."""

    take: Callable[[torch.Tensor], None]
    x_TH: torch.Tensor

    def wait(self) -> None:
        self.take(self.x_TH)


class LoopbackChannel:
    """Both ends of a link; what is sent is copied, as on a wire."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._queue: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._timeout_s = timeout_s
        self._bytes_sent = 0
        self._closed = False

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def send(self, x_TH: torch.Tensor) -> None:
        if self._closed:
            raise LinkError("the link is closed")
        self._queue.put(x_TH.clone())
        self._bytes_sent += x_TH.numel() * x_TH.element_size()

    def post_recv(self, x_TH: torch.Tensor) -> LoopbackArrival:
        return LoopbackArrival(self._take, x_TH)

    def _take(self, x_TH: torch.Tensor) -> None:
        try:
            sent = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LinkError(f"nothing was sent within {self._timeout_s} s") from None
        if sent is None:
            self._queue.put(None)  # for whoever comes next
            raise LinkError("the link is closed")
        x_TH.copy_(sent)

    def abort(self) -> None:
        """No device waits for it."""

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
