"""A search's findings: tables for a person, a document for --json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from orca_dist.cli.sim_tables import plain_table
from orca_dist.config import Split
from orca_dist.core import Batching
from orca_dist.sim.layouts import Misfit, Target
from orca_dist.sim.planner import Candidate, Demand, Found
from orca_dist.sim.roofline import MEMORY_SHARE

WIDTH = 160  # where it isn't a terminal that says how wide it is
LATER = "*"


def print_note(text: str) -> None:
    """To stderr."""
    Console(stderr=True).print(f"note: {text}", highlight=False, soft_wrap=True)


def print_found(target: Target, found: Found, top: int) -> None:
    """The `top` best, how the best lies on the devices, and what has no room."""
    stdout = Console()
    console = stdout if stdout.is_terminal else Console(width=WIDTH)
    console.print(_candidates(found, top))
    for line in (*_remarks(found, top), *_misfits(found)):
        console.print(line, highlight=False, soft_wrap=True)
    best = found.candidates[0]
    console.print(f"\n{_title(best)}", highlight=False, soft_wrap=True)
    console.print(_split(best))
    each = best.stages[0].room_bytes / best.layout.tensor_parallel / 1e9
    console.print(
        f"GB of each stage's {best.layout.tensor_parallel} x {target.cluster.device.name}, "
        f"{MEMORY_SHARE:.0%} of whose memory are {each:.1f} GB; free is what the stage with the "
        "most to hold leaves unused at the others.",
        highlight=False,
        soft_wrap=True,
    )


def _candidates(found: Found, top: int) -> Table:
    table = plain_table(
        *("stages", "TP", "batch", "policy", "SLO", "req/s", "s/token p50", "p99"),
        *("KV tokens", "bubble", "reason"),
    )
    table.columns[3].justify = table.columns[-1].justify = "left"
    for candidate in found.candidates[:top]:
        table.add_row(*_row(candidate))
    return table


def _row(candidate: Candidate) -> list[str]:
    report = candidate.report
    meets = candidate.meets_slo and candidate.keeps_up
    return [
        str(candidate.layout.num_stages),
        f"{candidate.layout.tensor_parallel}{'' if candidate.servable else LATER}",
        str(candidate.schedule.max_batch_size),
        _policy(candidate),
        "met" if meets else "behind" if candidate.meets_slo else "missed",
        f"{report.throughput_req_s:.3g}",
        f"{candidate.latency_s:.3g}",
        f"{report.normalized_latency_s.p99:.3g}",
        str(candidate.kv_tokens),
        f"{candidate.bubble:.0%}",
        candidate.reason,
    ]


def _policy(candidate: Candidate) -> str:
    schedule = candidate.schedule
    if schedule.batching is Batching.ITERATION:
        return f"{schedule.batching} {schedule.forming}"
    return f"{schedule.batching} by {schedule.micro_batch_size}"


def _remarks(found: Found, top: int) -> list[str]:
    shown, total = found.candidates[:top], len(found.candidates)
    lines = [] if len(shown) == total else [f"{len(shown)} of {total}; --top 0 prints all."]
    if not all(candidate.servable for candidate in shown):
        lines.append(f"{LATER} serve can't run this yet: its stages are of one device.")
    return lines


def _misfits(found: Found) -> list[str]:
    return [
        f"No room: {each.layout.num_stages} x {each.layout.tensor_parallel} devices: "
        f"{each.needed_bytes / 1e9:.1f} GB needed on one, {each.room_bytes / 1e9:.1f} GB there."
        for each in found.misfits
    ]


def _title(best: Candidate) -> str:
    """As a command where there is one."""
    words = [f"--{name.replace('_', '-')} {value}" for name, value in _flags(best).items()]
    end = "" if best.servable else " (not built yet)"
    return f"First: {' '.join(words)}{end}"


def _flags(candidate: Candidate) -> dict[str, object]:
    """What `serve` takes, and only what matters."""
    schedule = candidate.schedule
    names = ["stages", "max_batch_size", "batching"]
    names.append("micro_batch_size" if schedule.micro_batch_size else "forming")
    values = asdict(schedule)
    flags = {"split": Split.EVEN, **{name: values[name] for name in names}}
    sharded = {} if candidate.servable else {"tensor_parallel": candidate.layout.tensor_parallel}
    return {**flags, **sharded}


def _split(best: Candidate) -> Table:
    table = plain_table("stage", "node", "layers", "weights", "KV", "free", "bubble")
    for index, (room, share) in enumerate(zip(best.stages, best.report.stages, strict=True)):
        free_bytes = room.room_bytes - room.weights_bytes - room.kv_bytes
        sizes = (room.weights_bytes, room.kv_bytes, free_bytes)
        table.add_row(
            *map(str, (index, room.node, room.num_layers)),
            *(f"{size / 1e9:.2f}" for size in sizes),
            f"{share.bubble:.0%}",
        )
    return table


def document(target: Target, demand: Demand, found: Found) -> Mapping[str, object]:
    """For --json."""
    return {
        "gpu": target.cluster.device.name,
        "num_devices": target.cluster.num_devices,
        "rate": demand.rate,
        "slo_s": demand.slo_s,
        "num_requests": demand.num_requests,
        "candidates": [_candidate(candidate) for candidate in found.candidates],
        "no_room": [_misfit(misfit) for misfit in found.misfits],
    }


def _candidate(candidate: Candidate) -> dict[str, object]:
    report, schedule = candidate.report, candidate.schedule
    return {
        "stages": candidate.layout.num_stages,
        "tensor_parallel": candidate.layout.tensor_parallel,
        "num_devices": candidate.layout.num_devices,
        "servable": candidate.servable,
        "max_batch_size": schedule.max_batch_size,
        "micro_batch_size": schedule.micro_batch_size,
        "batching": schedule.batching,
        "forming": schedule.forming,
        "meets_slo": candidate.meets_slo,
        "keeps_up": candidate.keeps_up,
        "throughput_req_s": report.throughput_req_s,
        "normalized_latency_s": asdict(report.normalized_latency_s),
        "preemptions": report.preemptions,
        "kv_tokens": candidate.kv_tokens,
        "bubble": candidate.bubble,
        "reason": candidate.reason,
        "split": [asdict(stage) for stage in candidate.stages],
    }


def _misfit(misfit: Misfit) -> dict[str, object]:
    return {
        "stages": misfit.layout.num_stages,
        "tensor_parallel": misfit.layout.tensor_parallel,
        "needed_bytes": misfit.needed_bytes,
        "room_bytes": misfit.room_bytes,
    }
