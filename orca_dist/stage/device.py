"""Which device a stage computes on, by the name that a person gave."""

from __future__ import annotations

import torch

from orca_dist.device.cpu import CpuDevice
from orca_dist.device.cuda import CudaDevice
from orca_dist.device.seam import Device
from orca_dist.errors import ConfigError


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
