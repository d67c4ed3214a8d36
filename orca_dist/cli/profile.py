"""`orca-dist profile`: measure a pipeline's stages, for `orca-dist simulate --cost`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.output import count_progress, results_only
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.errors import ConfigError
from orca_dist.logs import Origin, set_up_logging

if TYPE_CHECKING:
    from orca_dist.bench.best_split import BestSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measure what iterations cost the stages of a pipeline, and write the simulator's table.

    Says, too, which split would have kept them equally busy. Takes some minutes on an idle
    machine; what else runs there is measured too.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder; or the name of the default model, which is fetched once."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("cost.json")
    """File to write."""
    seed: int = 0
    """Of the requests that are run."""
    engine: OmitArgPrefixes[EngineConfig]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        from orca_dist.bench.profile import run_profile
        from orca_dist.llm import resolve_model

        self.engine.check()
        set_up_logging(self.log, Origin())
        folder = resolve_model(self.model)
        with results_only(), count_progress("phases") as on_progress:
            profile = run_profile(
                folder, self.engine, self.log, seed=self.seed, on_progress=on_progress
            )
        try:
            self.output.write_text(json.dumps(profile.table, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output = {self.output}: can't be written: {error}") from None
        print(self.output)
        print(_advice(profile.split), file=sys.stderr)
        return 0


def _advice(split: BestSplit) -> str:
    """What the run says of where the layers were cut."""
    sizes = " ".join(map(str, split.sizes))
    return (
        f"stages waited for the slowest of them {split.idle_share_now:.1%} of their time; "
        f"with --split {sizes} it would be {split.idle_share:.1%}"
    )
