"""Tables for a person: what each request got, what each stage did. Pure, like the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich import box
from rich.table import Table
from rich.text import Text

from orca_dist.metrics.pipeline_view import color
from orca_dist.metrics.trace import TraceSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One answered request as its client saw it; times since it was sent."""

    letter: str
    prompt_tokens: int
    tokens: int
    first_token_s: float
    total_s: float
    finish_reason: str


class StagePlace(Protocol):
    """Where a stage runs, and which layers it has."""

    @property
    def pid(self) -> int: ...
    @property
    def layers(self) -> range: ...
    @property
    def device(self) -> str: ...


def request_table(rows: Sequence[RequestRow]) -> Table:
    """One line a request. tokens/s is the answer's length over the whole time it took."""
    table = _table("request", "prompt tokens", "tokens", "first token", "tokens/s", "ended by")
    for row in rows:
        table.add_row(
            Text(f" {row.letter} ", style=f"black on {color(row.letter)}"),
            str(row.prompt_tokens),
            str(row.tokens),
            f"{row.first_token_s * 1e3:.0f} ms",
            f"{row.tokens / row.total_s:.1f}",
            row.finish_reason,
        )
    return table


def stage_table(places: Sequence[StagePlace], summary: TraceSummary) -> Table:
    """One line a stage: its place, and what it did in the summary's time."""
    table = _table("stage", "pid", "layers", "device", "iterations", "busy", "sent on")
    for index, (place, stage) in enumerate(zip(places, summary.stages, strict=True)):
        table.add_row(
            str(index),
            str(place.pid),
            f"{place.layers.start}-{place.layers.stop - 1}",
            place.device,
            str(stage.iterations),
            f"{stage.busy:.0%}".replace("%", " %"),
            amount(stage.bytes_sent),
        )
    return table


def totals(rows: Sequence[RequestRow], summary: TraceSummary) -> str:
    """The whole run in two sentences."""
    tokens = sum(row.tokens for row in rows)
    rate = tokens / summary.duration_s if summary.duration_s else 0.0
    return (
        f"{len(rows)} requests, {tokens} tokens in {summary.duration_s:.1f} s, "
        f"{rate:.0f} tokens/s. "
        f"Batches in flight: at most {summary.max_in_flight}, "
        f"{summary.mean_in_flight:.2f} on average."
    )


def amount(num_bytes: int) -> str:
    """Bytes in a unit that suits them."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:.1f} MB"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("request", "ended by") else "right")
    return table
