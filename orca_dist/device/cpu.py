"""A stage on the host's own processors: nothing is copied, nothing is ever pending."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import torch

from orca_dist.device.seam import PASSED, Event

HERE = nullcontext()


class CpuDevice:
    """Everything is where it is, and done when it returns."""

    torch_device = torch.device("cpu")
    is_host = True
    free_bytes = 0

    @property
    def host_bytes(self) -> int:
        return min(psutil.virtual_memory().total, _cgroup_bytes())

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


def _cgroup_bytes() -> int:
    """The limit that a container or a Slurm job sets; a huge number where there is none."""
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::")[2].strip()
        limit = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.max").read_text(encoding="utf-8")
        return int(limit)
    except (OSError, ValueError):  # no such file, or the word "max"
        return sys.maxsize
