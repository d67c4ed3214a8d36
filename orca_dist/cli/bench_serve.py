"""`orca-dist bench serve`: a load on a live server, and how it bears it."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import environ
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from orca_dist.bench.attempt import Attempt
from orca_dist.bench.load_plot import (
    Curves,
    check_target,
    curve_points,
    draw_curves,
    draw_timeline,
    read_points,
)
from orca_dist.bench.load_report import LoadReport, Slo, make_report
from orca_dist.cli.interrupts import Interrupted, interruptible
from orca_dist.cli.load_tables import points_lines, report_lines
from orca_dist.cli.output import count_progress, print_json
from orca_dist.cli.settings import ClientConfig, load_settings
from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import parse_lengths
from orca_dist.sim.trace import read_workload
from orca_dist.sim.workload import Arrivals, Workload, make_workload

NUM_REQUESTS = 64
PROMPT_LENS = "32-512"
OUTPUT_LENS = "1-128"
POISSON = 1.0
LATE_S = 0.1  # a generator that is later than this may measure itself


def _client() -> ClientConfig:
    return load_settings(environ, None).client


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServe:
    """Send requests to a server as they come due, and time every token.

    Arrivals never wait for answers, unless --clients says how many may be out at once.
    Ctrl-C reports what was measured so far.
    """

    rate: float | None = None
    """Requests per second; by default all come at once."""
    rates: str = ""
    """Several of them, such as 1,2,4: a run for each, one after the other."""
    cv: float = POISSON
    """Variation of the gaps between arrivals: 1 is Poisson, more comes in bursts (Gamma), 0 is
    a steady beat."""
    clients: int | None = None
    """Requests out at once, instead of a rate: the next goes when one has its answer."""
    requests: int | None = None
    """Requests of a run; by default 64."""
    prompt_lens: str = PROMPT_LENS
    """Tokens of a prompt: 8, a range to draw from (32-512), or a list to go through (5,50,8)."""
    output_lens: str = OUTPUT_LENS
    """Tokens of an answer, written like --prompt-lens; each has exactly so many."""
    workload: Path | None = None
    """Requests from a file, .json, .jsonl or .csv, instead of all of the above but --clients."""
    seed: int = 0
    """Of lengths, arrivals and tokens. A server that caches prefixes knows the prompts again:
    another seed for another run."""
    slo_ttft_s: float | None = None
    """Goodput counts requests whose first token takes no longer than this."""
    slo_tpot_s: float | None = None
    """Goodput counts requests whose other tokens take no longer than this each."""
    plot: Path | None = None
    """Draw every request over time (with --rates: latency over throughput) into this file,
    .png or .svg; needs the extra orca-dist[plot]."""
    label: str = "this run"
    """Name of this run's curve in --plot."""
    compare: tuple[Path, ...] = ()
    """Documents of earlier runs (--rates --json), whose curves are drawn too, named as their
    files."""
    json: bool = False
    """Print one JSON document instead."""
    client: OmitArgPrefixes[ClientConfig] = field(default_factory=_client)

    def run(self, log: LogConfig) -> int:
        """Returns 0, 130 or 143 after a signal, 1 where no request was answered."""
        self._check()
        earlier = {path.stem: read_points(path) for path in self.compare}
        code, runs = self._measured([self._workload(rate) for rate in self._each_rate()])
        reports = [make_report(attempts, self._slo()) for attempts in runs]
        if not reports:
            return code
        self._print(reports, interrupted=code != 0)
        self._warn(reports)
        if self.plot:
            self._draw(self.plot, runs, reports, earlier)
        return code or (0 if any(report.completed for report in reports) else 1)

    def _measured(self, workloads: Sequence[Workload]) -> tuple[int, list[list[Attempt]]]:
        """What was sent until the end, or until a signal; and the exit code that goes with it."""
        from orca_dist.bench.serve import ServeBench

        with count_progress("answered") as on_progress:
            bench = ServeBench(
                self.client.address, workloads, seed=self.seed, on_progress=on_progress
            )
            try:
                asyncio.run(interruptible(bench.run()))
            except Interrupted as stop:
                return stop.exit_code, bench.results()
            return 0, bench.results()

    # ---- what is asked for ---------------------------------------------

    def _check(self) -> None:
        self.client.check()
        self._check_arrivals()
        for name, value in (("slo_ttft_s", self.slo_ttft_s), ("slo_tpot_s", self.slo_tpot_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} = {value}: must be more than 0, and finite")
        if self.plot is not None:
            check_target(self.plot)
        if self.compare and not (self.plot and self.rates):
            raise ConfigError("compare: needs --rates and --plot; leave it out, or add them")

    def _check_arrivals(self) -> None:
        has_rate = self.rate is not None or bool(self.rates)
        if self.rate is not None and self.rates:
            raise ConfigError(f"rates = {self.rates}: can't go with rate; leave one out")
        if self.clients is not None and has_rate:
            raise ConfigError(
                f"clients = {self.clients}: send when an answer is there, not at a rate; leave "
                "one out"
            )
        if self.cv != POISSON and not has_rate:
            raise ConfigError(f"cv = {self.cv}: varies a rate; give --rate or --rates")
        if self.workload is not None:
            self._check_file_alone(self.workload)

    def _check_file_alone(self, path: Path) -> None:
        given = {
            "rate": self.rate is not None,
            "rates": bool(self.rates),
            "requests": self.requests is not None,
            "prompt_lens": self.prompt_lens != PROMPT_LENS,
            "output_lens": self.output_lens != OUTPUT_LENS,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"{name}: the file {path} says it; leave one out")

    def _each_rate(self) -> list[float | None]:
        return (
            [_rate(self.rates, word) for word in self.rates.split(",")]
            if self.rates
            else [self.rate]
        )

    def _workload(self, rate: float | None) -> Workload:
        arrivals = Arrivals(rate=rate, cv=self.cv, clients=self.clients)
        arrivals.check()
        if self.workload is not None:
            return read_workload(self.workload, clients=self.clients)
        requests = NUM_REQUESTS if self.requests is None else self.requests
        if requests < 1:
            raise ConfigError(f"requests = {requests}: must be at least 1")
        return make_workload(
            num_requests=requests,
            prompt_lens=parse_lengths("prompt_lens", self.prompt_lens),
            output_lens=parse_lengths("output_lens", self.output_lens),
            arrivals=arrivals,
            seed=self.seed,
        )

    def _slo(self) -> Slo | None:
        if self.slo_ttft_s is None and self.slo_tpot_s is None:
            return None
        return Slo(ttft_s=self.slo_ttft_s, tpot_s=self.slo_tpot_s)

    # ---- what is shown -------------------------------------------------

    def _print(self, reports: Sequence[LoadReport], *, interrupted: bool) -> None:
        if self.json:
            print_json(self._document(reports, interrupted=interrupted))
            return
        rates = self._each_rate()
        offered = [self._offered(rate) for rate in rates[: len(reports)]]
        if self.rates:
            lines = points_lines(list(zip(offered, reports, strict=True)))
        else:
            lines = report_lines(offered[0], reports[0])
        print("\n".join(lines))

    def _document(self, reports: Sequence[LoadReport], *, interrupted: bool) -> dict[str, object]:
        if not self.rates:
            return {"interrupted": interrupted, **reports[0].document()}
        pairs = zip(self._each_rate(), reports, strict=False)  # fewer, if interrupted
        points = [{"rate": rate, **report.document()} for rate, report in pairs]
        return {"interrupted": interrupted, "points": points}

    def _offered(self, rate: float | None) -> str:
        if rate is not None:
            return f"{rate:g} requests/s"
        if self.clients is not None:
            return f"{self.clients} clients"
        return f"as {self.workload} says" if self.workload else "all at once"

    def _warn(self, reports: Sequence[LoadReport]) -> None:
        lag_s = max(report.max_lag_s for report in reports)
        if lag_s > LATE_S:
            _say(
                f"warning: requests went out up to {lag_s:.2f} s late, this machine was too busy; "
                "take lower rates, or send from another machine"
            )
        cached_tokens = sum(report.cached_tokens for report in reports)
        if cached_tokens and self.workload is None:
            _say(
                f"warning: {cached_tokens} prompt tokens were cached, as of an earlier run with "
                f"--seed {self.seed}; take another seed"
            )
        if not any(report.completed for report in reports):
            _say("error: no request was answered")

    def _draw(
        self,
        path: Path,
        runs: Sequence[Sequence[Attempt]],
        reports: Sequence[LoadReport],
        earlier: Curves,
    ) -> None:
        if not self.rates:
            draw_timeline(path, runs[0])
            return
        document = self._document(reports, interrupted=False)
        draw_curves(path, {**earlier, self.label: curve_points(document)})


def _rate(text: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ConfigError(f"rates = {text}: needs numbers, such as 1,2,4") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr)
