"""`orca-dist bench roofline`: how near a workload comes to its matmuls' own time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orca_dist.cli.bench_offline import OfflineFlags, offline_lines
from orca_dist.cli.output import count_progress, print_json, results_only
from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError
from orca_dist.spec import load_spec

if TYPE_CHECKING:
    from orca_dist.bench.roofline import Roofline, StageShares


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRoofline(OfflineFlags):
    """Run a workload as bench offline does, then time its matmuls alone, and compare.

    Says what share of the time the matmuls of the busiest stage are, and where the rest of each
    stage's time goes. On CPUs or GPUs of this machine.
    """

    rounds: int = 5
    """Times to measure the matmuls of each number of rows; medians count."""

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.offline import trace_offline
        from orca_dist.bench.roofline import check_plain, check_roofline, make_roofline
        from orca_dist.llm import resolve_model

        self.engine.check()
        check_roofline(self.engine)
        if self.rounds < 1:
            raise ConfigError(f"rounds = {self.rounds}: must be at least 1")
        folder = resolve_model(self.model)
        check_plain(load_spec(folder))
        jobs = self.jobs(folder)
        with results_only(), count_progress("requests") as on_progress:
            run = trace_offline(folder, self.engine, jobs, log, on_progress)
        with count_progress("rounds of matmuls") as on_progress:
            roofline = make_roofline(
                folder, self.engine, run, rounds=self.rounds, on_progress=on_progress
            )
        if self.json:
            print_json(_document(roofline))
        else:
            print("\n".join(_lines(roofline)))
        return 0


def _document(roofline: Roofline) -> dict[str, object]:
    """The figures of bench offline that matter here stand beside its own."""
    document = dataclasses.asdict(roofline)
    del document["offline"]
    offline = roofline.offline
    return {
        "wall_s": offline.wall_s,
        "total_tok_s": offline.total_tok_s,
        "iterations": offline.iterations,
        **document,
    }


def _lines(roofline: Roofline) -> list[str]:
    wall_s = roofline.offline.wall_s
    head = offline_lines(roofline.offline)[:2]
    return [
        *head,
        f"matmuls alone: {roofline.matmul_s:.2f} s in all, {roofline.dtype}, "
        f"{roofline.threads_per_stage} threads a stage; {roofline.timed_rows} of "
        f"{roofline.distinct_rows} numbers of rows timed",
        f"share reached: {100 * roofline.share:.1f} %, by stage {roofline.busiest_stage}",
        f"{'stage':>5}{'matmuls':>16}{'other compute':>16}{'receiving':>16}{'sending':>16}"
        f"{'waiting':>16}{'weights':>11}{'read at':>11}{'reading':>10}",
        *(_row(index, stage, wall_s) for index, stage in enumerate(roofline.stages)),
    ]


def _row(index: int, stage: StageShares, wall_s: float) -> str:
    parts_s = (
        stage.matmul_s,
        stage.other_compute_s,
        stage.receiving_s,
        stage.sending_s,
        stage.waiting_s,
    )
    cells = [f"{each:.2f} s {100 * each / wall_s:5.1f} %" for each in parts_s]
    return (
        f"{index:>5}"
        + "".join(f"{cell:>16}" for cell in cells)
        + f"{stage.weight_bytes / 1e6:>8.0f} MB{stage.read_gb_s:>6.1f} GB/s"
        + f"{stage.weight_read_s:>8.2f} s"
    )
