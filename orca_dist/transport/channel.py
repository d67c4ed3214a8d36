"""A one-way link between two neighbouring stages.

Carries flat [T, H] tensors whose shape both ends know from the plan: nothing
but their bytes travels. Order on a link is plan order.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Arrival(Protocol):
    """A receive that has been posted. Those of a link are waited for in the order of posting."""

    def wait(self) -> None:
        """Before the current stream uses the tensor. May return before it is there."""
        ...


class Channel(Protocol):
    """One end of a link. Errors of a broken or timed-out link are LinkError."""

    @property
    def bytes_sent(self) -> int:
        """Payload handed to send() so far."""
        ...

    def send(self, x_TH: torch.Tensor) -> None:
        """Hands x over and returns; it goes once the current stream has computed it.

        The link sees to it that x's memory stays until then. The caller may drop x, but not
        write to it.
        """
        ...

    def post_recv(self, x_TH: torch.Tensor) -> Arrival:
        """Lets the next tensor that was or will be sent come into x; returns at once.

        It comes once the current stream is done with what x was used for before.
        Only once it is known to be sent: what nobody answers fails at the link's time limit.
        """
        ...

    def abort(self) -> None:
        """Ends whatever of this link a device waits for. From any thread; close() follows."""
        ...

    def close(self) -> None:
        """Lets go of the link. Any number of times."""
        ...


class LinkError(Exception):
    """The neighbour is gone, or silent for longer than the link's time limit."""
