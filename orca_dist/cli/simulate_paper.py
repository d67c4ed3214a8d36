"""`orca-dist simulate paper`: the Orca paper's evaluation beside what the simulator says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes

from orca_dist.cli.output import print_json
from orca_dist.cli.sim_tables import NONE, plain_table
from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError
from orca_dist.logs import Origin, set_up_logging
from orca_dist.sim import paper
from orca_dist.sim.paper_runs import BatchRow, Evaluation, Mix, OnRun, Point, evaluate

MAX_REQUESTS = 100_000
STATED = {  # requests per second that the paper gives: Orca's, FasterTransformer's
    "175b_at_190ms": (6.81, 0.185),
    "101b_peak": (None, 0.49),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatePaper:
    """Simulate the Orca paper's evaluation: 13B to 341B, Orca against FasterTransformer."""

    num_requests: int = 400
    """Requests of each run."""
    seed: int = 0
    """Same seed, same requests."""
    json: bool = False
    """Print one JSON document instead."""
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        """Returns 0; raises ConfigError for wrong flags."""
        set_up_logging(self.log, Origin())
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            raise ConfigError(
                f"num_requests = {self.num_requests}: must be at least 1 and at most {MAX_REQUESTS}"
            )
        with _status() as on_run:
            found = evaluate(Mix(num_requests=self.num_requests, seed=self.seed), on_run)
        if self.json:
            print_json(_document(found))
        else:
            _print(found)
        return 0


def _document(found: Evaluation) -> dict[str, object]:
    return {
        "points": {name: point.document() for name, point in found.points.items()},
        "efficiency": paper.EFFICIENCY,
        "sensitivity": {f"{f:g}": point.document() for f, point in found.sensitivity.items()},
        "orca_batches": {_name(size): asdict(row) for size, row in found.orca_batches.items()},
        "ft_batches": {_name(size): asdict(row) for size, row in found.ft_batches.items()},
        "homogeneous_peak_req_s": dict(found.homogeneous),
    }


def _name(size: int | tuple[int, int]) -> str:
    return str(size) if isinstance(size, int) else ",".join(map(str, size))


def _print(found: Evaluation) -> None:
    console = Console()
    console.print(_point_table(found))
    console.print(_batch_table(found))
    table = plain_table("175B, requests all alike", "peak requests/s")
    for name, peak_req_s in found.homogeneous.items():
        table.add_row(name, _number(peak_req_s))
    console.print(table)


def _point_table(found: Evaluation) -> Table:
    table = plain_table("requests/s", "Orca", "paper", "FT", "paper", "Orca/FT", "paper")
    for name, point in found.points.items():
        table.add_row(*_compared(name, point))
    for factor, point in found.sensitivity.items():
        table.add_row(*_compared(f"175b_at_190ms, efficiency x {factor:g}", point))
    return table


def _batch_table(found: Evaluation) -> Table:
    table = plain_table("175B by batch", "peak requests/s", "at 190 ms", "s/token, light load")
    for size, row in found.orca_batches.items():
        table.add_row(f"orca({_name(size)})", *_row(row))
    for sizes, row in found.ft_batches.items():
        table.add_row(f"ft({_name(sizes)})", *_row(row))
    return table


def _row(row: BatchRow) -> list[str]:
    return [_number(row.peak_req_s), _number(row.at_target_req_s), _number(row.latency_s)]


def _compared(name: str, point: Point) -> list[str]:
    orca, ft = STATED.get(name, (None, None))
    ratio = orca / ft if orca and ft else None
    pairs = ((point.orca_req_s, orca), (point.ft_req_s, ft), (point.ratio, ratio))
    return [name, *(_number(value) for pair in pairs for value in pair)]


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"


@contextmanager
def _status() -> Iterator[OnRun]:
    """What is simulated now, on stderr."""
    with Console(stderr=True).status("simulating") as status:
        yield lambda text: status.update(f"simulating: {text}")
