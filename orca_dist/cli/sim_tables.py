"""A simulation's report for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from orca_dist.sim.report import Percentiles, Report

NONE = "-"


def print_report(report: Report, *, num_tokens: int, num_requests: int) -> None:
    """Latencies, stages, and the whole run in three lines."""
    console = Console()
    console.print(_latencies(report))
    console.print(_stages(report))
    tokens_s = report.throughput_req_s * num_tokens / num_requests
    lines = (
        f"{num_requests} requests, {num_tokens} tokens: {report.throughput_req_s:.4g} requests/s, "
        f"{tokens_s:.4g} tokens/s",
        f"{report.decode_steps} decode steps, slots {report.slot_utilization:.0%} busy, "
        f"{report.preemptions} preemptions",
    )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def print_points(rates: Sequence[float], points: Sequence[Report]) -> None:
    """One line a rate."""
    table = plain_table(
        "rate", "requests/s", "s/token p50", "p90", "p99", "first token p50", "slots"
    )
    for rate, point in zip(rates, points, strict=True):
        latency = point.normalized_latency_s
        table.add_row(
            f"{rate:g}",
            f"{point.throughput_req_s:.4g}",
            *_cells(latency),
            _seconds(point.ttft_s.p50),
            f"{point.slot_utilization:.0%}",
        )
    Console().print(table)


def _latencies(report: Report) -> Table:
    table = plain_table("seconds", "p50", "p90", "p99")
    table.add_row("latency / tokens", *_cells(report.normalized_latency_s))
    table.add_row("first token", *_cells(report.ttft_s))
    table.add_row("each other token", *_cells(report.tpot_s))
    return table


def _stages(report: Report) -> Table:
    table = plain_table("stage", "busy", "bubble")
    for index, stage in enumerate(report.stages):
        table.add_row(str(index), f"{stage.busy:.1%}", f"{stage.bubble:.1%}")
    return table


def _cells(percentiles: Percentiles) -> list[str]:
    return [_seconds(value) for value in (percentiles.p50, percentiles.p90, percentiles.p99)]


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def plain_table(*columns: str) -> Table:
    """The first column names the row, the others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table
