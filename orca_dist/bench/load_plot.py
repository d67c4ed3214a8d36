"""Pictures of loads, with matplotlib (extra `plot`), which is imported when one is drawn.

Latency over throughput, like the paper's figure 10; or every request of one run over time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orca_dist.bench.attempt import Attempt
from orca_dist.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
COLORS = ("#2f6fab", "#d9822b", "#3a9a5b", "#b5485d", "#7d5ba6", "#5f6b73")
MARKERS = ("o", "s", "^", "D", "v", "P")
WAITING, GENERATING, FAILED = "#c9ced6", "#2f6fab", "#c0392b"
ROW_HEIGHT, MIN_BARS_HEIGHT, MAX_BARS_HEIGHT, LOWER_HEIGHT = 0.12, 1.8, 6.0, 1.8  # inches
POINTS_AN_INCH, MIN_LINE_WIDTH, MAX_MARK_SIZE = 72, 0.3, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One rate: what was asked for, what came, and the normalised latency's percentiles."""

    rate: float | None
    throughput_req_s: float
    p50_s: float
    p90_s: float


Curves = Mapping[str, Sequence[CurvePoint]]  # by label


def curve_points(document: Mapping[str, Any]) -> list[CurvePoint]:
    """Of what --rates --json prints; points without an answer are left out.

    Raises KeyError or TypeError where it is no such document.
    """
    return [
        CurvePoint(
            rate=point["rate"],
            throughput_req_s=point["throughput_req_s"],
            p50_s=point["normalized_latency_s"]["p50"],
            p90_s=point["normalized_latency_s"]["p90"],
        )
        for point in document["points"]
        if point["normalized_latency_s"]["p50"] is not None
    ]


def read_points(path: Path) -> list[CurvePoint]:
    """Of a file; raises ConfigError where there are none."""
    try:
        return curve_points(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: is not what bench serve --rates --json prints") from None


def check_target(path: Path) -> None:
    """Raises ConfigError where no picture could be written, before anything is sent."""
    if path.suffix not in KINDS:
        raise ConfigError(f"plot = {path}: the name has to end in {' or '.join(KINDS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot = {path}: there is no folder {path.parent}; make it first")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"plot = {path}: needs matplotlib; pip install 'orca-dist[plot]'")


def draw_curves(path: Path, curves: Curves) -> None:
    """Normalised latency over throughput, the median whole and the 90th percentile dashed;
    each median is labelled with the rate that was offered."""
    figure = _figure(7.2, 4.6)
    axes = figure.add_subplot()
    for index, (label, points) in enumerate(curves.items()):
        _draw_curve(axes, label, points, index)
    axes.set_xlabel("throughput (requests/s)")
    axes.set_ylabel("normalised latency (ms per token)")
    axes.set_title(
        "Whole line: median. Dashed: 90th percentile. Numbers: offered requests/s.", fontsize=10
    )
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    if any(curves.values()):
        _scale_latencies(axes)
    _plain(axes)
    axes.legend(frameon=False, loc="upper left")
    _save(figure, path)


def _draw_curve(axes: Axes, label: str, points: Sequence[CurvePoint], index: int) -> None:
    color = COLORS[index % len(COLORS)]
    x = [point.throughput_req_s for point in points]
    p50 = [point.p50_s * 1e3 for point in points]
    marker = MARKERS[index % len(MARKERS)]
    axes.plot(x, p50, color=color, marker=marker, label=label)
    p90 = [point.p90_s * 1e3 for point in points]
    axes.plot(x, p90, "--", color=color, marker=marker, markersize=3, linewidth=0.8, alpha=0.7)
    for point, at_x, at_y in zip(points, x, p50, strict=True):
        if point.rate is not None:
            axes.annotate(
                f"{point.rate:g}",
                (at_x, at_y),
                xytext=(0, -12),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=color,
            )


def _scale_latencies(axes: Axes) -> None:
    """A server that can't keep up is slower by orders of magnitude."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_timeline(path: Path, attempts: Sequence[Attempt]) -> None:
    """Every request from when it was due to its end, its wait for the first token lighter;
    below, how many were out."""
    bars_height = min(MAX_BARS_HEIGHT, max(MIN_BARS_HEIGHT, ROW_HEIGHT * len(attempts)))
    figure = _figure(9, bars_height + LOWER_HEIGHT)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[bars_height, LOWER_HEIGHT])
    _draw_bars(upper, attempts, line_width=POINTS_AN_INCH * 0.7 * bars_height / len(attempts))
    _draw_num_out(lower, attempts)
    _save(figure, path)


def _draw_bars(axes: Axes, attempts: Sequence[Attempt], line_width: float) -> None:
    first_s = [each.token_s[0] if each.token_s else each.heard_s for each in attempts]
    due_s, heard_s = [each.due_s for each in attempts], [each.heard_s for each in attempts]
    rows, width = range(len(attempts)), max(MIN_LINE_WIDTH, line_width)
    wait_label, rest_label = "waits for its first token", "gets the others"
    axes.hlines(rows, due_s, first_s, colors=WAITING, linewidths=width, label=wait_label)
    axes.hlines(rows, first_s, heard_s, colors=GENERATING, linewidths=width, label=rest_label)
    _mark_failures(axes, attempts, min(MAX_MARK_SIZE, max(1.0, line_width)))
    axes.set_ylim(len(attempts) - 0.4, -0.6)
    axes.set_ylabel("request")
    axes.legend(frameon=False, loc="lower left", ncols=3, bbox_to_anchor=(0, 1), borderaxespad=0.2)
    _plain(axes)


def _mark_failures(axes: Axes, attempts: Sequence[Attempt], size: float) -> None:
    bad = [(row, each.heard_s) for row, each in enumerate(attempts) if not each.is_answered]
    if bad:
        rows, ends_s = [row for row, _ in bad], [end_s for _, end_s in bad]
        label = "refused, failed or cut off"
        axes.plot(ends_s, rows, "x", color=FAILED, markersize=size, label=label)


def _draw_num_out(axes: Axes, attempts: Sequence[Attempt]) -> None:
    from matplotlib.ticker import MaxNLocator

    changes = sorted(
        [(attempt.due_s, 1) for attempt in attempts]
        + [(attempt.heard_s, -1) for attempt in attempts]
    )
    times_s, counts, num_out = [0.0], [0], 0
    for time_s, change in changes:
        num_out += change
        times_s.append(time_s)
        counts.append(num_out)
    axes.fill_between(times_s, counts, step="post", color=GENERATING, alpha=0.35, linewidth=0)
    axes.step(times_s, counts, where="post", color=GENERATING, linewidth=1)
    axes.set_ylabel("out at once")
    axes.set_xlabel("seconds since the start")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _figure(width: float, height: float) -> Figure:
    """Without pyplot, which would keep every figure for ever."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot = {path}: can't be written: {error}") from None
