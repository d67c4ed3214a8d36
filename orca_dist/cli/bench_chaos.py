"""`orca-dist bench chaos`: faults on a live pipeline, and what its answers suffer from them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.bench.faults import ANY_PROCESS, USUAL, Fault, Round, make_rounds, parse_faults
from orca_dist.cli.local_engine import LocalEngine
from orca_dist.cli.output import count_progress, print_json, results_only
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import MAX_TIMEOUT_S, Launcher, LogConfig, Switch
from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import parse_lengths
from orca_dist.sim.workload import Arrivals, Workload, make_workload

if TYPE_CHECKING:
    from orca_dist.bench.chaos import ChaosResult, RoundTimes

MARGIN_S = 60.0  # beyond the engine's own limits


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchChaos:
    """Let stages come to harm under load, one fault a round, and compare every answer with the one
    that came without faults.

    Fails if any request is lost, is answered twice in part, or gets other tokens.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder; or the name of the default model, which is fetched once."""
    rounds: int = 20
    """Faults, one after the other; every stage meets each before any meets it again."""
    faults: str = ",".join(USUAL)
    """What happens to a stage: kill (SIGKILL), stop (SIGSTOP), exception (a layer raises), netcut
    (its data links break), hangup (its control stream breaks), hang (a layer never ends, which is
    noticed after --step-limit-s)."""
    gap_s: float = 2.0
    """Longest time from an answering pipeline to the next fault; it is drawn at random."""
    second_share: float = 0.0
    """Share of rounds in which another stage is killed during the recovery."""
    prompts: int = 16
    """Prompts to ask for again and again; every second one is sampled, at temperature 1."""
    prompt_lens: str = "4-48"
    """Tokens of a prompt: 8, a range to draw from (32-512), or a list to go through (5,50,8)."""
    output_lens: str = "8-48"
    """Tokens of an answer, written like --prompt-lens."""
    clients: int = 12
    """Most requests at once."""
    rate: float | None = None
    """Requests per second, Poisson; by default what the run without faults answered."""
    seed: int = 0
    """Of faults, lengths, arrivals and tokens."""
    json: bool = False
    """Print one JSON document instead."""
    engine: OmitArgPrefixes[LocalEngine]

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.chaos import Limits, Load, live_chaos
        from orca_dist.llm import resolve_model

        self._check()
        rounds, workload = self._rounds(), self._workload()
        folder = resolve_model(self.model)
        with results_only(), count_progress("rounds") as on_progress:
            result = live_chaos(
                folder,
                self.engine,
                workload,
                rounds,
                Load(clients=self.clients, rate=self.rate, seed=self.seed),
                Limits(
                    notice_s=self.engine.heartbeat_s + self.engine.step_limit_s + MARGIN_S,
                    recovery_s=self.engine.recovery_timeout_s + MARGIN_S,
                ),
                log,
                on_progress,
            )
        if self.json:
            print_json(_document(result))
        else:
            print("\n".join(_lines(result)))
        return 0 if result.is_clean and len(result.rounds) == self.rounds else 1

    def _rounds(self) -> list[Round]:
        rounds = make_rounds(
            parse_faults(self.faults),
            self.engine.stages,
            max_delay_s=self.gap_s,
            seed=self.seed,
            second_share=self.second_share,
        )
        return list(itertools.islice(rounds, self.rounds))

    def _workload(self) -> Workload:
        return make_workload(
            num_requests=self.prompts,
            prompt_lens=parse_lengths("prompt_lens", self.prompt_lens),
            output_lens=parse_lengths("output_lens", self.output_lens),
            arrivals=Arrivals(),
            seed=self.seed,
        )

    def _check(self) -> None:
        self.engine.check()
        Arrivals(rate=self.rate, clients=self.clients).check()
        for name, least in (("rounds", 1), ("prompts", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least {least}")
        if not 0 <= self.gap_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"gap_s = {self.gap_s}: must be at least 0 and at most a day")
        if not 0 <= self.second_share <= 1:
            raise ConfigError(f"second_share = {self.second_share}: must be in [0, 1]")
        if self.second_share and self.engine.stages == 1:
            raise ConfigError(
                f"second_share = {self.second_share}: there is no other stage; take --stages 2, or "
                "leave it out"
            )
        if self.engine.recovery is Switch.OFF:
            raise ConfigError("recovery = off: the first fault would be the last; leave it on")
        self._check_faults()

    def _check_faults(self) -> None:
        faults, engine = parse_faults(self.faults), self.engine
        others = [fault for fault in faults if fault not in ANY_PROCESS]
        if others and engine.launcher is not Launcher.LOCAL:
            raise ConfigError(
                f"faults = {self.faults}: the stages of --launcher {engine.launcher} don't obey "
                f"{', '.join(others)}; take --faults kill,stop, or --launcher local"
            )
        if engine.ray_address:
            raise ConfigError(
                f"ray_address = {engine.ray_address}: faults are signals to processes of this "
                "machine; leave it out"
            )
        if Fault.NETCUT in faults and engine.stages == 1:
            raise ConfigError(
                f"faults = {self.faults}: a single stage has no links to cut; take --stages 2, or "
                "leave netcut out"
            )


def _document(result: ChaosResult) -> dict[str, object]:
    faults = dict.fromkeys(each.fault for each in result.rounds)
    return {
        "rounds": len(result.rounds),
        "requests": result.requests,
        "lost": result.lost,
        "duplicated": result.duplicated,
        "differing": result.differing,
        "recoveries": result.recoveries,
        "leaked_slots": result.leaked_slots,
        **_figures(result.rounds),
        "faults": {fault: _by_fault(result, fault) for fault in sorted(faults)},
        "each": [asdict(each) for each in result.rounds],
    }


def _by_fault(result: ChaosResult, fault: Fault) -> dict[str, object]:
    rounds = [each for each in result.rounds if each.fault is fault]
    return {"rounds": len(rounds), **_figures(rounds)}


def _figures(rounds: Sequence[RoundTimes]) -> dict[str, object]:
    """Nulls where there was no round."""
    columns = {
        "detection_s": [each.detection_s for each in rounds],
        "recovery_s": [each.recovery_s for each in rounds],
        "first_token_s": [each.first_token_s for each in rounds],
    }
    return {
        name: {"median": _rounded(statistics.median, values), "max": _rounded(max, values)}
        for name, values in columns.items()
    }


def _rounded(figure: Callable[[list[float]], float], values: list[float]) -> float | None:
    return round(figure(values), 4) if values else None


def _lines(result: ChaosResult) -> list[str]:
    heads = ("noticed", "serving again", "first token")
    lines = [
        f"{len(result.rounds)} faults, {result.recoveries} recoveries, {result.requests} requests: "
        f"{result.lost} lost, {result.duplicated} duplicated, {result.differing} differing",
        "",
        f"{'seconds after':14}{'rounds':>7}" + "".join(f"{head:>18}" for head in heads),
        f"{'the fault':14}{'':>7}" + f"{'median    max':>18}" * len(heads),
    ]
    for fault in dict.fromkeys(sorted(each.fault for each in result.rounds)):
        lines.append(_line(fault, [each for each in result.rounds if each.fault is fault]))
    return [*lines, _line("all", result.rounds)]


def _line(name: str, rounds: Sequence[RoundTimes]) -> str:
    cells = [
        "--" if figure["median"] is None else f"{figure['median']:.2f} {figure['max']:6.2f}"
        for figure in _figures(rounds).values()
    ]
    return f"{name:14}{len(rounds):>7}" + "".join(f"{cell:>18}" for cell in cells)
