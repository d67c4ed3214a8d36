"""The memory limit that a container or a job of a batch system sets to this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def cgroup_limit(own: Path = OWN_CGROUP, root: Path = CGROUPS) -> tuple[int, int] | None:
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
