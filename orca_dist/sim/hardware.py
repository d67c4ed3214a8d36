"""What devices can do at most, from their makers' datasheets.

Peaks are of dense fp16 or bf16 matrix units; bandwidths are both directions
together, as datasheets count them. The CPU is not from a datasheet but measured:
two cores with AVX512-BF16, and a loopback socket for a link.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from orca_dist.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`nvlink_bytes_s` is 0 where there is none."""

    name: str
    flop_s: float
    memory_bytes_s: float
    memory_bytes: float
    nvlink_bytes_s: float
    pcie_bytes_s: float

    @property
    def link_bytes_s(self) -> float:
        """One direction of the fastest link to a neighbour in the same node."""
        return max(self.nvlink_bytes_s, self.pcie_bytes_s) / 2


def _device(
    name: str, tflop_s: float, memory_gb_s: float, memory_gb: float, nvlink: float, pcie: float
) -> Device:
    return Device(
        name=name,
        flop_s=tflop_s * 1e12,
        memory_bytes_s=memory_gb_s * 1e9,
        memory_bytes=memory_gb * 1e9,
        nvlink_bytes_s=nvlink * 1e9,
        pcie_bytes_s=pcie * 1e9,
    )


DEVICES = {
    device.name: device
    for device in (
        _device("A100-40GB", 312, 1555, 40, 600, 64),
        _device("A100-80GB", 312, 2039, 80, 600, 64),
        _device("H100", 989, 3350, 80, 900, 128),
        _device("H200", 989, 4800, 141, 900, 128),
        _device("L4", 121, 300, 24, 0, 64),
        _device("L40S", 362, 864, 48, 0, 64),
        _device("CPU", 0.353, 26, 16, 0, 1.5),
    )
}


def find_device(name: str) -> Device:
    """By name, whatever the case; raises ConfigError with near names."""
    known = {device.lower(): device for device in DEVICES}
    if (key := name.lower()) in known:
        return DEVICES[known[key]]
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(known[each] for each in close)}?" if close else ""
    raise ConfigError(f"gpu = {name}: not known{hint}; choose one of {', '.join(DEVICES)}")
