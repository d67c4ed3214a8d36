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
    """Normalised latency over throughput: the median as a line, up to the 90th percentile
    shaded; each point is labelled with the rate that was offered."""
    figure = _figure(7.2, 4.6)
    axes = figure.add_subplot()
    for index, (label, points) in enumerate(curves.items()):
        _draw_curve(axes, label, points, index)
    axes.set_xlabel("throughput (requests/s)")
    axes.set_ylabel("normalised latency (ms per token)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title("Median, shaded up to p90; numbers are the offered requests/s", fontsize=10)
    _plain(axes)
    axes.legend(frameon=False, loc="upper left")
    _save(figure, path)


def _draw_curve(axes: Axes, label: str, points: Sequence[CurvePoint], index: int) -> None:
    color = COLORS[index % len(COLORS)]
    x = [point.throughput_req_s for point in points]
    p50 = [point.p50_s * 1e3 for point in points]
    axes.fill_between(
        x, p50, [point.p90_s * 1e3 for point in points], color=color, alpha=0.13, linewidth=0
    )
    axes.plot(x, p50, color=color, marker=MARKERS[index % len(MARKERS)], label=label)
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


def draw_timeline(path: Path, attempts: Sequence[Attempt]) -> None:
    """Every request from when it was due to its end, its wait for the first token lighter;
    below, how many were out."""
    bars_height = min(MAX_BARS_HEIGHT, max(MIN_BARS_HEIGHT, ROW_HEIGHT * len(attempts)))
    figure = _figure(9, bars_height + LOWER_HEIGHT)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[bars_height, LOWER_HEIGHT])
    _draw_bars(upper, attempts)
    _draw_num_out(lower, attempts)
    _save(figure, path)


def _draw_bars(axes: Axes, attempts: Sequence[Attempt]) -> None:
    first_s = [each.token_s[0] if each.token_s else each.heard_s for each in attempts]
    waits = [(each.due_s, first) for each, first in zip(attempts, first_s, strict=True)]
    rests = [(first, each.heard_s) for each, first in zip(attempts, first_s, strict=True)]
    _draw_spans(axes, waits, WAITING, "waits for its first token")
    _draw_spans(axes, rests, GENERATING, "gets the others")
    _mark_failures(axes, attempts)
    axes.set_ylim(len(attempts) - 0.4, -0.6)
    axes.set_ylabel("request")
    axes.legend(frameon=False, loc="lower left", ncols=3, bbox_to_anchor=(0, 1), borderaxespad=0.2)
    _plain(axes)


def _draw_spans(axes: Axes, spans: Sequence[tuple[float, float]], color: str, label: str) -> None:
    axes.barh(
        range(len(spans)),
        [end_s - start_s for start_s, end_s in spans],
        left=[start_s for start_s, _ in spans],
        height=0.8,
        color=color,
        label=label,
        linewidth=0,
    )


def _mark_failures(axes: Axes, attempts: Sequence[Attempt]) -> None:
    bad = [(row, each.heard_s) for row, each in enumerate(attempts) if not each.is_answered]
    if bad:
        rows, ends_s = [row for row, _ in bad], [end_s for _, end_s in bad]
        axes.plot(ends_s, rows, "x", color=FAILED, markersize=5, label="refused, failed or cut off")


def _draw_num_out(axes: Axes, attempts: Sequence[Attempt]) -> None:
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
    axes.yaxis.get_major_locator().set_params(integer=True)
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
