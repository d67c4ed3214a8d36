"""Memory that this process may use: the machine's, a container's or job's, and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from orca_dist.doctor.facts import MemoryFacts, SpaceFacts

SHM = "/dev/shm"
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

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
    limit = cgroup_limit(OWN_CGROUP, CGROUPS)
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


def cgroup_limit(own: Path, root: Path) -> tuple[int, int] | None:
    """The lowest limit of the process's group and those around it, with the bytes in use there.

    own: the file that names the groups; root: where their files are (version 1 or 2).
    """
    limits = [found for folder, names in _groups(own, root) if (found := _limit(folder, names))]
    return min(limits, default=None)


def _groups(own: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders from the process's group up to the root, and their files for limit and use."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, top = ("memory.max", "memory.current"), root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            top = root / "memory"
        else:
            continue
        place = top / path.lstrip("/")
        yield from ((folder, names) for folder in (place, *place.parents) if _within(folder, top))


def _within(folder: Path, top: Path) -> bool:
    return folder == top or top in folder.parents


def _limit(folder: Path, names: tuple[str, str]) -> tuple[int, int] | None:
    try:
        limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names)
    except (OSError, ValueError):  # no such file, or the word "max"
        return None
    return limit, used
