"""Whether a model can be loaded from where this process runs."""

from __future__ import annotations

from pathlib import Path

from orca_dist.doctor.facts import ModelFacts, Source, SourceKind
from orca_dist.errors import ModelError
from orca_dist.spec import load_spec
from orca_dist.weights.source import HubModel, check_source

HUB_TIMEOUT_S = 10.0


def model_facts(source: Source) -> ModelFacts:
    """Reads headers, no weights; of a model of the Hub it fetches nothing."""
    if source.kind is SourceKind.HUB:
        return _hub_facts(source)
    folder = Path(source.name)
    if not folder.is_dir():
        return ModelFacts(name=source.name, fetched=False, problem="no such folder")
    try:
        spec = load_spec(folder)
        if source.has_weights:
            check_source(folder, spec)
    except (ModelError, OSError) as error:
        return ModelFacts(name=source.name, fetched=False, problem=str(error))
    return ModelFacts(name=source.name, fetched=True)


def _hub_facts(source: Source) -> ModelFacts:
    """Whole in this node's cache, or the Hub answers."""
    from huggingface_hub import HfApi, constants

    from orca_dist.weights.hub_files import hub_errors, remembered

    revision = source.revision or constants.DEFAULT_REVISION
    kept = remembered(source.name, revision)
    if kept and _is_whole(kept, has_weights=source.has_weights):
        return ModelFacts(name=source.name, fetched=True)
    try:
        with hub_errors(source.name, revision):
            HfApi().model_info(source.name, revision=revision, timeout=HUB_TIMEOUT_S)
    except ModelError as error:
        return ModelFacts(name=source.name, fetched=False, problem=str(error))
    return ModelFacts(name=source.name, fetched=False)


def _is_whole(model: HubModel, *, has_weights: bool) -> bool:
    from orca_dist.weights.headers import read_headers
    from orca_dist.weights.hub_files import cached_folder

    folder = cached_folder(model)
    try:
        load_spec(folder)
        if has_weights:
            read_headers(folder)
    except (ModelError, OSError):
        return False
    return True
