"""Sizes and times as a report writes them."""

from __future__ import annotations

from collections.abc import Sequence

GIB, MIB = 2**30, 2**20


def size(num_bytes: float) -> str:
    """Of memory, in binary units."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def rate(bytes_s: float) -> str:
    """Of a link, in decimal units."""
    return f"{bytes_s / 1e9:.2g} GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.3g} MB/s"


def milliseconds(seconds: float) -> str:
    """Of a latency."""
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def listed(names: Sequence[str], most: int = 6) -> str:
    """a, b, c and 3 more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
