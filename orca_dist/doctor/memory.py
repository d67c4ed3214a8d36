"""Memory that this process may use: the machine's, a container's or job's, and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil

from orca_dist.cgroups import cgroup_limit
from orca_dist.doctor.facts import MemoryFacts, SpaceFacts

SHM = "/dev/shm"

StatVfs = Callable[[str], os.statvfs_result]


def shm_facts(statvfs: StatVfs = os.statvfs) -> SpaceFacts:
    """Room in the file system of shared memory."""
    try:
        found = statvfs(SHM)
    except OSError as error:
        return SpaceFacts(problem=f"{SHM}: {error.strerror or error}")
    return SpaceFacts(
        total_bytes=found.f_blocks * found.f_frsize, free_bytes=found.f_bavail * found.f_frsize
    )


def memory_facts() -> MemoryFacts:
    """The least of the machine's memory and every limit around this process."""
    machine = psutil.virtual_memory()
    limit = cgroup_limit()
    if limit is None or limit[0] >= machine.total:
        return MemoryFacts(
            limit_bytes=machine.total, available_bytes=machine.available, is_limited=False
        )
    limit_bytes, used_bytes = limit
    return MemoryFacts(
        limit_bytes=limit_bytes,
        available_bytes=max(0, min(machine.available, limit_bytes - used_bytes)),
        is_limited=True,
    )
