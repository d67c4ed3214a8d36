"""An examination for a person, and as a document for --json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orca_dist.cli.sim_tables import plain_table
from orca_dist.doctor import Finding, Report, Verdict
from orca_dist.doctor.facts import Link, NodeFacts
from orca_dist.doctor.words import listed, milliseconds, rate

WIDTH = 120  # where it isn't a terminal that says how wide it is
STYLES = {Verdict.PASS: "green", Verdict.WARN: "black on yellow", Verdict.FAIL: "bold white on red"}
MAX_LINKS = 16
ARROW = "→ "
CLUSTER = "cluster"  # what is said of no single node


def print_report(report: Report) -> None:
    """Findings, those alike of several nodes as one; ways between nodes; and the count."""
    stdout = Console()
    console = stdout if stdout.is_terminal else Console(width=WIDTH)
    console.print(_findings(report))
    between = [link for link in report.links if link.source != link.target]
    if between:
        console.print(_links(between))
        if len(between) > MAX_LINKS:
            console.print(f"The {MAX_LINKS} slowest of {len(between)}; --json has all of them.")
    console.print(_summary(report), highlight=False, soft_wrap=True)


def _findings(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("check")
    if len(report.nodes) > 1:
        table.add_column("node", max_width=24)
    table.add_column("seen, and what to do", overflow="fold")
    for finding, nodes in _merged(report.findings):
        where = [_where(nodes, len(report.nodes))] if len(report.nodes) > 1 else []
        mark = Text(f" {finding.verdict} ", style=STYLES[finding.verdict])
        table.add_row(mark, finding.check, *where, _words(finding))
    return table


def _merged(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Each finding without its node, and the nodes it is of."""
    merged: dict[Finding, list[str]] = {}
    for finding in findings:
        merged.setdefault(replace(finding, node=""), []).append(finding.node)
    return list(merged.items())


def _where(nodes: Sequence[str], num_nodes: int) -> str:
    if len(nodes) == num_nodes:
        return f"all {num_nodes}"
    return listed([node or CLUSTER for node in nodes])


def _words(finding: Finding) -> Text:
    words = Text(finding.seen)
    if finding.remedy:
        words.append(f"\n{ARROW}{finding.remedy}", style="bold")
    return words


def _links(links: Sequence[Link]) -> Table:
    table = plain_table("from", "to", "there and back", "bandwidth", "clock ahead")
    table.columns[1].justify = "left"
    for link in sorted(links, key=_slowness)[:MAX_LINKS]:
        table.add_row(link.source, link.target, *_cells(link))
    return table


def _slowness(link: Link) -> tuple[bool, float]:
    """Broken ones first, then by bandwidth."""
    return not link.problem, link.bytes_s


def _cells(link: Link) -> list[str]:
    if link.problem:
        return ["-", "-", "-"]
    return [milliseconds(link.latency_s), rate(link.bytes_s), f"{link.offset_s * 1e3:+.2g} ms"]


def _summary(report: Report) -> str:
    counts = Counter(finding.verdict for finding in report.findings)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
    num_nodes = len(report.nodes)
    return f"{len(report.findings)} checks of {num_nodes} node{'s' * (num_nodes > 1)}: {told}"


def document(report: Report) -> Mapping[str, object]:
    """For --json; a node that did not answer has a `problem` in place of facts."""
    return {
        "verdict": report.verdict,
        "findings": [asdict(finding) for finding in report.findings],
        "links": [asdict(link) for link in report.links],
        "nodes": [
            asdict(node)
            if isinstance(node, NodeFacts)
            else {"node": node.node, "problem": node.problem}
            for node in report.nodes
        ],
    }
