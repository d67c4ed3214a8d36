"""What a stage's host tells its device before a batch, and hears from it after: tables and tokens.

The same for every device; on the host's own nothing moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orca_dist.device.seam import PASSED, Device, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Tables on their way to the device, all in one piece of its memory."""

    device: Device
    flat_N: torch.Tensor
    tables: Sequence[torch.Tensor]
    copied: Event

    def wait(self) -> None:
        """Before the current stream uses them."""
        self.copied.wait()
        self.device.hold(self.flat_N)

    def first(self, num_tables: int) -> torch.Tensor:
        """So many of the tables, back to back."""
        tables = self.tables[:num_tables]
        if self.device.is_host:
            return torch.cat(list(tables))
        return self.flat_N[: sum(map(len, tables))]


@dataclass(slots=True)
class PinnedBuffer:
    """One place of the ring, and the copy that last read it."""

    buffer_N: torch.Tensor
    copied: Event = PASSED


class Uploads:
    """Tables of batches, int64, by way of a ring of pinned buffers: one copy a batch.

    The copies go on the inbound stream, beside what is computed. With a buffer more than plans
    in flight, the copy that last read a buffer is over long before the buffer is filled again.
    """

    def __init__(self, device: Device, *, num_buffers: int) -> None:
        self._device = device
        nothing = torch.empty(0, dtype=torch.int64)
        self._ring = deque(PinnedBuffer(nothing) for _ in range(num_buffers))

    def send(self, tables: Sequence[torch.Tensor]) -> Upload:
        """Flat tables to the device; wait() before using them. On the host they are there."""
        if self._device.is_host:
            return Upload(device=self._device, flat_N=tables[0], tables=tables, copied=PASSED)
        pinned = self._ring[0]
        self._ring.rotate(-1)
        host_N = self._filled(pinned, tables)
        with self._device.inbound():
            flat_N = torch.empty(host_N.shape, dtype=host_N.dtype, device=self._device.torch_device)
            flat_N.copy_(host_N, non_blocking=True)
            pinned.copied = self._device.record()
        parts = flat_N.split([len(table) for table in tables])
        return Upload(device=self._device, flat_N=flat_N, tables=parts, copied=pinned.copied)

    def _filled(self, pinned: PinnedBuffer, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tables back to back in a buffer that nothing reads any more."""
        pinned.copied.synchronize()
        num = sum(len(table) for table in tables)
        if num > len(pinned.buffer_N):
            pinned.buffer_N = self._device.pinned(torch.Size([2 * num]), torch.int64)
        return torch.cat(list(tables), out=pinned.buffer_N[:num])


def download(device: Device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Device tensors on the host, complete: the one wait of a stage for its device."""
    if device.is_host:
        return list(tensors)
    copies = [_copied(device, tensor) for tensor in tensors]
    device.record().synchronize()
    return copies


def _copied(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """On its way to pinned memory."""
    return device.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
