"""The small seam that keeps a device's manners out of the rest of the stage.

Work on a device may run behind the caller; only download() waits for it.
"""

from __future__ import annotations

from typing import Protocol

import psutil
import torch

from orca_dist.cgroups import cgroup_limit
from orca_dist.errors import ConfigError


class Device(Protocol):
    """Where a stage computes."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def free_bytes(self) -> int:
        """Memory of the device's own that is free; 0 where it shares the host's."""
        ...

    @property
    def host_bytes(self) -> int:
        """Memory that it shares with all stages of its host; 0 where it has its own."""
        ...

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device; may still be on its way."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A device tensor on the host, complete."""
        ...


class CpuDevice:
    """Everything is where it is, and done when it returns."""

    torch_device = torch.device("cpu")
    free_bytes = 0

    @property
    def host_bytes(self) -> int:
        limit = cgroup_limit()
        total = psutil.virtual_memory().total
        return total if limit is None else min(total, limit[0])

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class CudaDevice:
    """One GPU; uploads go through pinned memory so that they don't wait."""

    host_bytes = 0

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)

    @property
    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")


def make_device(name: str) -> Device:
    """`cpu` or `cuda` (the one GPU that the launcher gave this stage)."""
    if name == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device = {name}: this torch ({torch.__version__}) sees no CUDA device here; "
            "choose device = cpu, or see to driver and torch build"
        )
    return CudaDevice()
