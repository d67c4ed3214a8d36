"""The paper's comparisons, simulated: throughput at a latency, peaks, batch sizes, sensitivity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from orca_dist.sim import paper
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.report import Report, make_report
from orca_dist.sim.roofline import RooflineCost
from orca_dist.sim.simulation import Setup, simulate
from orca_dist.sim.workload import Arrivals, Workload, make_workload

LOW_RATE, HIGH_RATE = 0.05, 1.2  # of the peak: where the search begins
SEARCH_STEPS = 8  # each halves the range of rates, on a logarithmic scale: to 1.3 percent
ORCA_RATE, FT_RATE = 2.0, 0.05  # requests per second that each system serves with ease
SENSITIVITY = (0.75, 1.25)  # of the efficiency

OnRun = Callable[[str], None]  # told what is simulated next


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Requests per second of both systems; FasterTransformer's best configuration."""

    orca_req_s: float
    ft_req_s: float

    @property
    def ratio(self) -> float | None:
        return self.orca_req_s / self.ft_req_s if self.ft_req_s else None

    def document(self) -> dict[str, float | None]:
        """For --json."""
        return {"orca_req_s": self.orca_req_s, "ft_req_s": self.ft_req_s, "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One system at one batch size on the 175B model.

    `latency_s` is the median normalised one at a rate that every configuration sustains.
    """

    peak_req_s: float
    at_target_req_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All comparisons; `sensitivity` by the factor on the efficiency, the 175B model's batches
    by their sizes, and peaks of requests that are all alike by the system."""

    points: Mapping[str, Point]
    sensitivity: Mapping[float, Point]
    orca_batches: Mapping[int, BatchRow]
    ft_batches: Mapping[tuple[int, int], BatchRow]
    homogeneous: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What comes in; the same for all that is compared."""

    num_requests: int
    seed: int = 0
    prompt_lens: Lengths = paper.PROMPT_LENS
    output_lens: Lengths = paper.OUTPUT_LENS

    def workload(self, rate: float | None) -> Workload:
        """Poisson at `rate`; None: all at once."""
        return make_workload(
            num_requests=self.num_requests,
            prompt_lens=self.prompt_lens,
            output_lens=self.output_lens,
            arrivals=Arrivals(rate=rate),
            seed=self.seed,
        )


def evaluate(mix: Mix, on_run: OnRun) -> Evaluation:
    """All of it; minutes, most of them FasterTransformer's many small iterations."""
    cost = paper.MODELS["175b"].cost()
    orca = dict(orca_batches(mix, cost, on_run))
    ft = dict(ft_batches(mix, cost, on_run))
    return Evaluation(
        points=_points(mix, orca[paper.ORCA_BATCH], [ft[b] for b in paper.FT_BATCHES], on_run),
        sensitivity={
            factor: at_target(mix, paper.MODELS["175b"].cost(paper.EFFICIENCY * factor), on_run)
            for factor in SENSITIVITY
        },
        orca_batches=orca,
        ft_batches=ft,
        homogeneous=dict(homogeneous(mix.num_requests, cost, on_run)),
    )


def _points(mix: Mix, orca: BatchRow, best_ft: list[BatchRow], on_run: OnRun) -> dict[str, Point]:
    """The paper's headline, then every model's peak; the 175B model's are known already."""
    found = {
        "175b_at_190ms": Point(
            orca_req_s=orca.at_target_req_s,
            ft_req_s=max(row.at_target_req_s for row in best_ft),
        ),
        "175b_peak": Point(
            orca_req_s=orca.peak_req_s, ft_req_s=max(row.peak_req_s for row in best_ft)
        ),
    }
    for name in ("13b", "101b", "341b"):
        on_run(f"{name}: peaks")
        found[f"{name}_peak"] = peaks(mix, paper.MODELS[name].cost())
    return found


def orca_batches(mix: Mix, cost: RooflineCost, on_run: OnRun) -> Iterator[tuple[int, BatchRow]]:
    """Orca by its largest batch, latencies at 2 requests per second."""
    for batch in paper.ORCA_BATCHES:
        on_run(f"Orca, max batch {batch}")
        yield batch, _row(mix, paper.orca(cost, batch), ORCA_RATE)


def ft_batches(
    mix: Mix, cost: RooflineCost, on_run: OnRun
) -> Iterator[tuple[tuple[int, int], BatchRow]]:
    """FasterTransformer by (batch, micro-batch), latencies at 0.05 requests per second."""
    for batch, micro in (*paper.FT_BATCHES, *paper.LARGER_FT_BATCHES):
        on_run(f"FasterTransformer, batch {batch} in micro-batches of {micro}")
        yield (batch, micro), _row(mix, paper.faster_transformer(cost, batch, micro), FT_RATE)


def at_target(mix: Mix, cost: RooflineCost, on_run: OnRun) -> Point:
    """Throughputs at which the median normalised latency is the paper's target."""
    on_run(f"throughput at {paper.TARGET_S * 1e3:.0f} ms a token")
    return Point(
        orca_req_s=_at_target(mix, paper.orca(cost)),
        ft_req_s=max(_at_target(mix, setup) for setup in _best_ft(cost)),
    )


def peaks(mix: Mix, cost: RooflineCost) -> Point:
    """Throughputs when there is always another request waiting."""
    return Point(
        orca_req_s=_peak(mix, paper.orca(cost)),
        ft_req_s=max(_peak(mix, setup) for setup in _best_ft(cost)),
    )


def homogeneous(
    num_requests: int, cost: RooflineCost, on_run: OnRun
) -> Iterator[tuple[str, float]]:
    """Peaks where all requests are alike, so that no member of a batch ends before another."""
    prompt_lens, output_lens = paper.HOMOGENEOUS
    mix = Mix(num_requests=num_requests, prompt_lens=prompt_lens, output_lens=output_lens)
    on_run("requests that are all alike")
    for batch, micro in paper.FT_BATCHES:
        setup = paper.faster_transformer(cost, batch, micro)
        yield f"ft({batch},{micro})", _peak(mix, setup)
    for batch in (1, *paper.ORCA_BATCHES):
        yield f"orca({batch})", _peak(mix, paper.orca(cost, batch))


def throughput_at(mix: Mix, setup: Setup, peak_req_s: float) -> float:
    """The most that is served with a median normalised latency of at most the paper's target.

    0 where even hardly any load takes longer.
    """
    low, high = LOW_RATE * peak_req_s, HIGH_RATE * peak_req_s
    best = _report(mix, setup, low)
    if _latency_s(best) > paper.TARGET_S:
        return 0.0
    for _ in range(SEARCH_STEPS):
        middle = math.sqrt(low * high)
        report = _report(mix, setup, middle)
        if _latency_s(report) <= paper.TARGET_S:
            low, best = middle, report
        else:
            high = middle
    return best.throughput_req_s


def _row(mix: Mix, setup: Setup, rate: float) -> BatchRow:
    peak_req_s = _peak(mix, setup)
    return BatchRow(
        peak_req_s=peak_req_s,
        at_target_req_s=throughput_at(mix, setup, peak_req_s),
        latency_s=_latency_s(_report(mix, setup, rate)),
    )


def _at_target(mix: Mix, setup: Setup) -> float:
    return throughput_at(mix, setup, _peak(mix, setup))


def _best_ft(cost: RooflineCost) -> list[Setup]:
    return [paper.faster_transformer(cost, batch, micro) for batch, micro in paper.FT_BATCHES]


def _peak(mix: Mix, setup: Setup) -> float:
    """Requests per second when there is always another one waiting."""
    return _report(mix, setup, None).throughput_req_s


def _latency_s(report: Report) -> float:
    median = report.normalized_latency_s.p50
    assert median is not None
    return median


def _report(mix: Mix, setup: Setup, rate: float | None) -> Report:
    return make_report(simulate(setup, mix.workload(rate)))
