"""A link over a two-member torch.distributed group, whatever its backend.

Member 0 is the upstream stage. One group a neighbour pair, built directly
rather than carved from a global one: a replaced stage re-makes two links, and no
link's sends queue behind another's. NCCL has a stream of its own for each group: what is begun
comes after the current stream's work so far, and wait() lets the current stream, not the
caller, go on after it. gloo knows no streams, and its wait() is the caller's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from orca_dist.transport.channel import LinkError

UPSTREAM, DOWNSTREAM = 0, 1


@dataclass(frozen=True, slots=True)
class GroupArrival:
    """A receive under way in the group."""

    work: Any

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _receive_error(error) from error


class GroupChannel:
    """One end of a link.

    gloo never reports a send as completed before it is waited for, so a send is
    waited for when `max_pending` later ones have been posted; with as many plans
    in flight that wait is over before it begins.
    """

    def __init__(self, group: Any, *, member: int, max_pending: int) -> None:
        self._group: Any = group
        self._peer = 1 - member
        self._max_pending = max_pending
        self._pending: deque[tuple[Any, torch.Tensor]] = deque()
        self._bytes_sent = 0

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def greet(self, probe: torch.Tensor) -> None:
        """Pass a dummy tensor down the link, so that it exists before the first plan."""
        if self._peer == DOWNSTREAM:
            self._post(probe)
        else:
            self.post_recv(probe).wait()

    def send(self, x_TH: torch.Tensor) -> None:
        self._post(x_TH)
        self._bytes_sent += x_TH.numel() * x_TH.element_size()

    def post_recv(self, x_TH: torch.Tensor) -> GroupArrival:
        try:
            return GroupArrival(self._open_group().recv([x_TH], self._peer, 0))
        except RuntimeError as error:
            raise _receive_error(error) from error

    def abort(self) -> None:
        """No device waits for gloo, and what a thread waits for only its peer can end."""

    def close(self) -> None:
        self._group = None
        self._pending = deque()

    def _post(self, x_TH: torch.Tensor) -> None:
        pending = self._pending  # of this send; close() lets go of it
        try:
            pending.append((self._open_group().send([x_TH], self._peer, 0), x_TH))
            while len(pending) > self._max_pending:
                pending[0][0].wait()
                pending.popleft()
        except RuntimeError as error:
            raise LinkError(f"sending to the next stage failed: {error}") from error

    def _open_group(self) -> Any:
        if self._group is None:
            raise LinkError("the link is closed")
        return self._group


def _receive_error(error: RuntimeError) -> LinkError:
    return LinkError(f"receiving from the previous stage failed: {error}")
