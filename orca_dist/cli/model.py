"""`orca-dist model`: fetch a model, convert a GGUF file, show what a model holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

from orca_dist.cli.output import print_json
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.logs import Origin, set_up_logging

if TYPE_CHECKING:
    from orca_dist.weights.source import HubModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Fetch a model with all its weights, unless it is here already, and print its folder."""

    model: Positional[str] = DEFAULT_MODEL
    """Id of the Hub (org/name), or the default model's name."""
    revision: str = ""
    """Branch, tag or commit; by default the main branch."""

    def run(self) -> int:
        from orca_dist.llm import resolve_model
        from orca_dist.weights.source import hub_model

        folder = resolve_model(self.model, EngineConfig(revision=self.revision))
        if model := hub_model(folder):
            _fetch_weights(folder, model)
        print(folder)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """Convert a GGUF file to a Hugging Face model folder."""

    source: Positional[Path]
    """The .gguf file."""
    target: Positional[Path]
    """Folder to make; it must not exist yet."""

    def run(self) -> int:
        from orca_dist.weights.gguf import convert_gguf

        print(convert_gguf(self.source, self.target))
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """Show a model's shapes, sizes and files; of a model of the Hub no weights are fetched."""

    model: Positional[str]
    """Model folder, id of the Hub (org/name), or the default model's name."""
    revision: str = ""
    """Branch, tag or commit of a model of the Hub; by default its main branch."""
    json: bool = False
    """Print one JSON document instead."""

    def run(self) -> int:
        from orca_dist.llm import resolve_model
        from orca_dist.weights import describe

        facts = describe(resolve_model(self.model, EngineConfig(revision=self.revision)))
        if self.json:
            print_json(facts)
        else:
            print("\n".join(f"{name}: {value}" for name, value in facts.items()))
        return 0


def _fetch_weights(folder: Path, model: HubModel) -> None:
    from orca_dist.spec import load_spec
    from orca_dist.weights.hub import fetch_weights
    from orca_dist.weights.progress import load_progress
    from orca_dist.weights.source import check_source

    check_source(folder, load_spec(folder))
    with load_progress(f"fetching {model.repo}") as on_bytes:
        fetch_weights(model, on_bytes)


ACTIONS: dict[str, type[Fetch] | type[Convert] | type[Show]] = {
    "fetch": Fetch,
    "convert": Convert,
    "show": Show,
}
Action = (
    Annotated[Fetch, subcommand("fetch")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Show, subcommand("show")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Fetch, convert or show models."""

    action: OmitArgPrefixes[Action]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        set_up_logging(self.log, Origin())
        return self.action.run()
