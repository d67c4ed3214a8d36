"""What was asked for, as nodes are to look for it, and what it takes."""

from __future__ import annotations

from pathlib import Path

from orca_dist.config import DeviceKind, Dtype, EngineConfig, LoadFormat, LogConfig
from orca_dist.doctor.facts import Demand, Need, Source, SourceKind
from orca_dist.engine.settle import (
    ITEMSIZE,
    cpus_per_stage,
    settle,
    settle_device,
    settle_max_model_len,
)
from orca_dist.errors import ModelError
from orca_dist.sim.shapes import shape_of
from orca_dist.spec import ModelSpec, load_spec
from orca_dist.weights.fetch import DEFAULT_MODEL, default_model_folder
from orca_dist.weights.source import is_repo_id


def source_of_model(model: str, config: EngineConfig) -> Source:
    """As `serve` would read the name; whether it is there is for the nodes to say."""
    has_weights = config.load_format is not LoadFormat.DUMMY
    folder = Path(model).expanduser()
    if not folder.is_dir() and model == DEFAULT_MODEL.name:
        return Source(
            kind=SourceKind.FOLDER,
            name=str(default_model_folder()),
            has_weights=has_weights,
            is_default=True,
        )
    if not folder.exists() and is_repo_id(model):
        return Source(
            kind=SourceKind.HUB, name=model, revision=config.revision, has_weights=has_weights
        )
    return Source(kind=SourceKind.FOLDER, name=str(folder.absolute()), has_weights=has_weights)


def demand_of(config: EngineConfig) -> Demand:
    """Of the stages, as the launcher would ask Ray for it."""
    return Demand(
        num_stages=config.stages,
        num_cpus=cpus_per_stage(config),
        on_gpu=settle_device(config.device) is DeviceKind.CUDA,
    )


def need_of(source: Source, config: EngineConfig) -> Need | None:
    """None where config.json is not here, or no model's.

    Raises ConfigError for what can't work with this model, as `serve` would.
    """
    spec = _spec(source)
    if spec is None:
        return None
    settled = settle(source.name, spec, config, LogConfig())
    itemsize, shape = ITEMSIZE[Dtype(settled.dtype)], shape_of(spec)
    weights = [shape.stage_weights(layers) for layers in settled.layers]
    return Need(
        stage_bytes=tuple(
            elements * itemsize + activations
            for elements, activations in zip(weights, settled.activation_bytes, strict=True)
        ),
        token_bytes=spec.kv_bytes_per_token(itemsize),
        max_model_len=settle_max_model_len(spec, config),
        memory_share=settled.memory_share,
        on_gpu=settled.device is DeviceKind.CUDA,
        link_bytes=config.max_batch_tokens * spec.hidden_size * itemsize,
        rows=config.max_batch_tokens,
    )


def _spec(source: Source) -> ModelSpec | None:
    folder = _folder(source)
    try:
        return load_spec(folder) if folder else None
    except (ModelError, OSError):
        return None


def _folder(source: Source) -> Path | None:
    """Where config.json lies; of a model of the Hub only if it was fetched before."""
    if source.kind is SourceKind.FOLDER:
        return Path(source.name)
    from huggingface_hub import constants

    from orca_dist.weights.hub_files import cached_folder, remembered

    kept = remembered(source.name, source.revision or constants.DEFAULT_REVISION)
    return cached_folder(kept) if kept else None
