"""The seam that keeps a device's manners out of stages and links: streams, events, memory.

Work that a thread begins goes to its current stream, in order and behind the caller's back. That is
the compute stream, in every thread that doesn't say otherwise; `inbound` is for what comes to the
device and `outbound` for what leaves it, one for each direction so that neither queues behind the
other. Two streams know nothing of each other but what events tell them. A copy is torch's
`target.copy_(source, non_blocking=True)`, between the device and pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Work = Callable[[], torch.Tensor]  # given to the current stream; what it returns is on the device


class Event(Protocol):
    """All that a stream had been given when it was recorded."""

    def wait(self) -> None:
        """What the current stream is given from now on comes after it. Returns at once."""
        ...

    def synchronize(self) -> None:
        """Returns once all of it is over."""
        ...


class Device(Protocol):
    """Where a stage computes."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def is_host(self) -> bool:
        """Its memory is the host's, and everything is done when it returns."""
        ...

    @property
    def free_bytes(self) -> int:
        """Memory of the device's own that is free; 0 where it shares the host's."""
        ...

    @property
    def host_bytes(self) -> int:
        """Memory that it shares with all stages of its host; 0 where it has its own."""
        ...

    def inbound(self) -> AbstractContextManager[object]:
        """Within it this thread's current stream is the one for what comes to the device."""
        ...

    def outbound(self) -> AbstractContextManager[object]:
        """Within it this thread's current stream is the one for what leaves the device."""
        ...

    def record(self) -> Event:
        """All that the current stream has been given so far."""
        ...

    def hold(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory from other use until the current stream is done with it.

        For tensors that another stream made: when they are dropped, only that one is asked.
        """
        ...

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies don't make the caller wait for.

        It may be dropped during a copy: torch gives it to nobody else before that is over.
        """
        ...

    def capture(self, work: Work) -> Work:
        """What does the same again each time it is called: the same operations on the same memory.

        It sees no variable of the host's any more. All that is captured shares memory of its own,
        so what a call returns is whole until the next call of any of them is given to the stream.
        The work itself is done here once or more, and has to bear that; the caller may wait here.
        """
        ...


class Passed:
    """An event of something that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


PASSED = Passed()
