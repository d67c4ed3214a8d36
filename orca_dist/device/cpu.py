"""A stage on the host's own processors: nothing is copied, nothing is ever pending."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import psutil
import torch

from orca_dist.cgroups import cgroup_limit
from orca_dist.device.seam import PASSED, Event, Work

HERE = nullcontext()


class CpuDevice:
    """Everything is where it is, and done when it returns."""

    torch_device = torch.device("cpu")
    is_host = True
    free_bytes = 0

    @property
    def host_bytes(self) -> int:
        limit = cgroup_limit()
        total = psutil.virtual_memory().total
        return total if limit is None else min(total, limit[0])

    def inbound(self) -> AbstractContextManager[object]:
        return HERE

    def outbound(self) -> AbstractContextManager[object]:
        return HERE

    def record(self) -> Event:
        return PASSED

    def hold(self, tensor: torch.Tensor) -> None:
        """Whoever refers to it holds it."""

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, work: Work) -> Work:
        """Nothing is launched here that could be kept."""
        return work
