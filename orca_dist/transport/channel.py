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
        """Returns when the tensor is there."""
        ...


class Channel(Protocol):
    """One end of a link. Errors of a broken or timed-out link are LinkError."""

    @property
    def bytes_sent(self) -> int:
        """Payload handed to send() so far."""
        ...

    def send(self, x_TH: torch.Tensor) -> None:
        """Hands x over and returns; x stays referenced until it has been sent.

        The caller may drop x, but not write to it.
        """
        ...

    def post_recv(self, x_TH: torch.Tensor) -> Arrival:
        """Lets the next tensor that was or will be sent come into x; returns at once.

        Only once it is known to be sent: what nobody answers fails at the link's time limit.
        """
        ...

    def close(self) -> None:
        """Lets go of the link. Any number of times."""
        ...


class LinkError(Exception):
    """The neighbour is gone, or silent for longer than the link's time limit."""
