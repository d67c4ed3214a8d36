"""`orca-dist bench soak`: thousands of requests of every kind, and what is left behind."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.interrupts import interruptible
from orca_dist.cli.local_engine import LocalEngine
from orca_dist.cli.output import count_progress, print_json, results_only
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import Launcher, LogConfig, Switch
from orca_dist.errors import ConfigError

if TYPE_CHECKING:
    from orca_dist.bench.soak import SoakConfig, SoakResult


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSoak:
    """Send requests of every kind to a server of its own, some of them taken back at any moment,
    some of them bad, and count what is left behind.

    Fails if KV blocks, table entries, threads or open files are left, memory grows beyond
    --growth-limit-mb, or any request ends as it should not.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder; or the name of the default model, which is fetched once."""
    requests: int = 20_000
    """Requests to send; the first quarter warms up."""
    cancel_share: float = 0.3
    """Share that is taken back: by leaving after some tokens or some time, or by Abort."""
    bad_share: float = 0.05
    """Share that has to be refused."""
    prompt_len: int = 24
    """Most tokens of a prompt."""
    out: int = 12
    """Most tokens of an answer."""
    clients: int = 128
    """Requests at once: some run, some wait."""
    compute: Switch = Switch.ON
    """Off: stages hand on what they get, so that more requests fit into a minute (with --launcher
    local)."""
    growth_limit_mb: float = 50.0
    """Most that the memory of any process may grow after the warm-up."""
    seed: int = 0
    """Of lengths, tokens and manners."""
    json: bool = False
    """Print one JSON document instead."""
    engine: OmitArgPrefixes[LocalEngine]

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.soak import run_soak, start_engine
        from orca_dist.llm import resolve_model

        self._check()
        folder = resolve_model(self.model)
        with results_only(), count_progress("requests") as on_progress:
            engine = start_engine(folder, self.engine, log, compute=self.compute is Switch.ON)
            try:
                result = asyncio.run(
                    interruptible(run_soak(engine, folder, self._config(), on_progress))
                )
            finally:
                engine.close()
        if self.json:
            print_json(_document(result))
        else:
            print("\n".join(_lines(result)))
        grown = result.rss_growth_mb > self.growth_limit_mb
        if grown:
            print(
                f"error: a process grew by {result.rss_growth_mb:.0f} MB, more than "
                f"growth_limit_mb = {self.growth_limit_mb:g}",
                file=sys.stderr,
            )
        return 0 if result.is_clean and not grown else 1

    def _config(self) -> SoakConfig:
        from orca_dist.bench.soak import SoakConfig

        return SoakConfig(
            requests=self.requests,
            cancel_share=self.cancel_share,
            bad_share=self.bad_share,
            prompt_len=self.prompt_len,
            out=self.out,
            clients=self.clients,
            seed=self.seed,
        )

    def _check(self) -> None:
        self.engine.check()
        for name, least in (("requests", 8), ("prompt_len", 1), ("out", 1), ("clients", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least {least}")
        for name in ("cancel_share", "bad_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be in [0, 1]")
        if self.cancel_share + self.bad_share > 1:
            raise ConfigError(
                f"cancel_share = {self.cancel_share}: with bad_share = {self.bad_share} more than 1"
            )
        if self.compute is Switch.OFF and self.engine.launcher is not Launcher.LOCAL:
            raise ConfigError(
                f"compute = off: the stages of --launcher {self.engine.launcher} always compute; "
                "leave it on, or take --launcher local"
            )


def _document(result: SoakResult) -> dict[str, object]:
    return {
        **asdict(result),
        "rss_growth_mb": round(result.rss_growth_mb, 1),
        "leaked_threads": result.leaked_threads,
        "leaked_files": result.leaked_files,
    }


def _lines(result: SoakResult) -> list[str]:
    names = ["server", *(f"stage {index}" for index in range(len(result.end.rss_mb) - 1))]
    pairs = zip(names, result.warm.rss_mb, result.end.rss_mb, strict=True)
    return [
        f"{result.requests} requests: {result.answered} answered, {result.cancelled} taken back, "
        f"{result.refused} refused, {result.failed} failed; {result.preempted} preemptions",
        f"left behind: {result.leaked_blocks} blocks, {result.leaked_entries} table entries, "
        f"{result.leaked_threads} threads, {result.leaked_files} open files",
        *(f"{name}: {warm:.0f} MB warm, {end:.0f} MB at the end" for name, warm, end in pairs),
    ]
