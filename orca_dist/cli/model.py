"""`orca-dist model`: fetch the default model, convert a GGUF file, show what a folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

from orca_dist.cli.output import print_json
from orca_dist.config import LogConfig
from orca_dist.logs import Origin, set_up_logging


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Fetch the default model, unless it is here already, and print its folder."""

    def run(self) -> int:
        from orca_dist.weights.fetch import fetch_default_model

        print(fetch_default_model())
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
    """Show a model folder's shapes, sizes and tokenizer."""

    model: Positional[str]
    """Model folder, or the default model's name."""
    json: bool = False
    """Print one JSON document instead."""

    def run(self) -> int:
        from orca_dist.llm import resolve_model
        from orca_dist.weights import describe

        facts = describe(resolve_model(self.model))
        if self.json:
            print_json(facts)
        else:
            print("\n".join(f"{name}: {value}" for name, value in facts.items()))
        return 0


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
