"""Pictures with matplotlib (extra `plot`): the pipeline over time, latency over throughput.

Like the paper's figures 8 and 10. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orca_dist.errors import ConfigError
from orca_dist.sim.pipeline import PlanRun
from orca_dist.sim.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
MAX_PLANS = 120  # more would be too narrow to tell apart
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MAX_NAMED = 6  # requests whose letters may fit a block


def check_target(path: Path) -> None:
    """Raises ConfigError where no picture could be written, before anything is simulated."""
    if path.suffix not in KINDS:
        raise ConfigError(f"plot = {path}: the name has to end in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot = {path}: there is no folder {path.parent}; make it first")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"plot = {path}: needs matplotlib; pip install 'orca-dist[plot]'")


def draw_pipeline(path: Path, runs: Sequence[PlanRun]) -> None:
    """The first plans of a run, stages down and time across; hatched where prompts are in."""
    figure, axes = _figure(width=12, height=1.2 + 0.5 * len(runs[0].starts_s))
    for run in runs[:MAX_PLANS]:
        for stage in range(len(run.starts_s)):
            _draw_block(axes, run, stage)
    num_stages = len(runs[0].starts_s)
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_title("Each block is a batch at a stage, named by its requests; hatched with prompts")
    _save(figure, path)


def draw_curves(path: Path, points: Sequence[Report]) -> None:
    """Median normalised latency over throughput, a point for each rate."""
    figure, axes = _figure(width=6, height=4)
    throughputs = [point.throughput_req_s for point in points]
    axes.plot(throughputs, [point.normalized_latency_s.p50 for point in points], marker="o")
    axes.set_xlabel("throughput (requests/s)")
    axes.set_ylabel("median normalised latency (s/token)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    _save(figure, path)


def _draw_block(axes: Axes, run: PlanRun, stage: int) -> None:
    start_s, end_s = run.starts_s[stage], run.ends_s[stage]
    ids = run.plan.ids
    prompts = max(run.plan.lengths) > 1
    axes.barh(
        stage,
        end_s - start_s,
        left=start_s,
        height=0.8,
        color=COLORS[min(ids) % len(COLORS)],
        edgecolor="white",
        hatch="///" if prompts else None,
    )
    if len(ids) <= MAX_NAMED:
        name = "".join(LETTERS[each % len(LETTERS)] for each in sorted(ids))
        text = axes.text((start_s + end_s) / 2, stage, name, ha="center", va="center", fontsize=7)
        text.set_clip_on(True)


def _figure(*, width: float, height: float) -> tuple[Figure, Any]:
    """Without pyplot, which would keep every figure for ever."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot = {path}: can't be written: {error}") from None
