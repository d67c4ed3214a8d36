"""The report of a load as lines for a person: one run in full, several in a row each."""

from __future__ import annotations

from collections.abc import Sequence

from orca_dist.bench.load_report import Goodput, LoadReport
from orca_dist.sim.report import Percentiles

Named = tuple[str, LoadReport]  # what was offered, and what came of it


def report_lines(offered: str, report: LoadReport) -> list[str]:
    """One run: how it ended, then a row a measure."""
    lines = [
        f"{report.completed} of {report.requests} requests answered, {offered}, in "
        f"{report.duration_s:.2f} s{_failures(report)}",
        f"{report.throughput_req_s:.2f} requests/s; {report.output_tok_s:.1f} answer tokens/s, "
        f"{report.total_tok_s:.1f} with prompts",
        "",
        f"{'milliseconds':<28}{'p50':>10}{'p90':>10}{'p99':>10}",
        _row("first token", report.ttft_s),
        _row("each of the others", report.tpot_s),
        _row("gap between two", report.inter_token_s),
        _row("whole request", report.latency_s),
        _row("whole request, per token", report.normalized_latency_s),
        "",
    ]
    if report.goodput:
        lines.append(_goodput_line(report.goodput, report))
    return [*lines, f"sent at most {1e3 * report.max_lag_s:.1f} ms late"]


def points_lines(points: Sequence[Named]) -> list[str]:
    """Several runs; latencies in milliseconds, of a request per token, p50 / p90."""
    head = (
        f"{'offered':>18} {'answered':>9} {'failed':>7} {'req/s':>8} {'tok/s':>8} "
        f"{'ms/token':>15} {'first token':>17} {'others':>15}"
    )
    rows = [head, *(_point(offered, report) for offered, report in points)]
    goodputs = [
        f"{offered}: {_goodput_line(report.goodput, report)}"
        for offered, report in points
        if report.goodput
    ]
    return [*rows, *goodputs]


def _row(name: str, values: Percentiles) -> str:
    return f"{name:<28}{_ms(values.p50):>10}{_ms(values.p90):>10}{_ms(values.p99):>10}"


def _point(offered: str, report: LoadReport) -> str:
    failed = sum(report.errors.values()) + report.unfinished
    return (
        f"{offered:>18} {report.completed:>9} {failed:>7} {report.throughput_req_s:>8.2f} "
        f"{report.output_tok_s:>8.1f} {_pair(report.normalized_latency_s):>15} "
        f"{_pair(report.ttft_s):>17} {_pair(report.tpot_s):>15}"
    )


def _pair(values: Percentiles) -> str:
    return f"{_ms(values.p50)} / {_ms(values.p90)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _failures(report: LoadReport) -> str:
    counts = [f"{count} {status}" for status, count in report.errors.items()]
    if report.unfinished:
        counts.append(f"{report.unfinished} cut off")
    return f"; not answered: {', '.join(counts)}" if counts else ""


def _goodput_line(goodput: Goodput, report: LoadReport) -> str:
    bounds = {"first token": goodput.slo.ttft_s, "each other token": goodput.slo.tpot_s}
    words = " and ".join(f"{name} within {_ms(s)} ms" for name, s in bounds.items() if s)
    num_ended = report.requests - report.unfinished
    return (
        f"goodput {goodput.req_s:.2f} requests/s: {100 * goodput.share:.1f} % of {num_ended} "
        f"had the {words}"
    )
