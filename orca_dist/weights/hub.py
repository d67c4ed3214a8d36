"""Models of the Hugging Face Hub: the driver fetches the small files, each stage its own shards.

Safetensors only. The driver also reads every shard's header, by a ranged request, so that
a model that can't be served is refused before any stage starts. Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    SafetensorsParsingError,
)

from orca_dist.errors import ModelError
from orca_dist.spec import load_spec
from orca_dist.weights.headers import (
    INDEX_FILE,
    SINGLE_FILE,
    Headers,
    TensorHeader,
    make_header,
    read_shard,
    read_weight_map,
)
from orca_dist.weights.hub_files import (
    RemoteFile,
    cached_folder,
    fetch_file,
    hub_errors,
    log_once,
    remember_revision,
    remembered,
    remote_file,
)
from orca_dist.weights.names import stage_tensors
from orca_dist.weights.source import HubModel

log = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]  # bytes done, bytes in all

CONFIG_FILE = "config.json"
DRIVER_FILES = frozenset(
    {
        CONFIG_FILE,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "adapter_config.json",  # tells what the repository is
        INDEX_FILE,
    }
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NUM_CONNECTIONS = 8


def fetch_model_files(repo: str, revision: str = "", *, weights: bool = True) -> Path:
    """The folder of a repository's snapshot, with its config, tokenizer and index in it.

    revision: branch, tag or commit; by default the main branch. `weights`: refuse one
    that has none. Without a network, what was fetched before does.
    Raises ModelError saying what to do.
    """
    log_once()
    revision = revision or constants.DEFAULT_REVISION
    try:
        with hub_errors(repo, revision):
            return _fetch_model_files(repo, revision, weights)
    except ModelError as error:
        kept = remembered(repo, revision)
        if kept is None or not _unreachable(error.__context__):
            raise
        folder = cached_folder(kept)
        if not (folder / CONFIG_FILE).exists():
            raise
        log.info("%s: what was fetched before is used: %s", repo, error)
        return folder


def fetch_weights(model: HubModel, on_bytes: OnBytes = lambda done, total: None) -> int:
    """Fetches every shard that isn't here; returns the bytes of those that weren't."""
    return fetch_shards(model, _shard_names(model).values() or [SINGLE_FILE], on_bytes)


def stage_config(model: HubModel) -> Path:
    """The snapshot's folder on this node, with the config and the index (if there is one) in it."""
    log_once()
    folder = cached_folder(model)
    if not (folder / CONFIG_FILE).exists():
        fetch_file(remote_file(model, CONFIG_FILE))
    return folder


def fetch_stage_weights(model: HubModel, layers: range, on_bytes: OnBytes) -> int:
    """Fetches the shards that hold the tensors of `layers`, and no others; returns their bytes.

    Bytes of what was here already are not counted.
    """
    weight_map = _shard_names(model)
    if not weight_map:
        return fetch_shards(model, [SINGLE_FILE], on_bytes)
    spec = load_spec(cached_folder(model))
    names = stage_tensors(spec, layers, weight_map)
    return fetch_shards(model, [weight_map[name] for name in names.values()], on_bytes)


def fetch_shards(
    model: HubModel, shards: Iterable[str], on_bytes: OnBytes = lambda done, total: None
) -> int:
    """Those that aren't here yet, one after the other; returns their bytes."""
    folder = cached_folder(model)
    missing = [name for name in dict.fromkeys(shards) if not (folder / name).exists()]
    files = [remote_file(model, name) for name in missing]
    total, done = sum(file.num_bytes for file in files), 0
    for file in files:
        log.info("fetching %s of %s: %.0f MB", file.name, model.repo, file.num_bytes / 1e6)
        fetch_file(file, _adding(done, total, on_bytes))
        done += file.num_bytes
    return total


def read_hub_headers(model: HubModel) -> Headers:
    """Name -> header of every tensor of the repository; only headers are read."""
    weight_map = _shard_names(model)
    shards = sorted(set(weight_map.values())) or [SINGLE_FILE]
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        headers = dict(
            zip(shards, pool.map(lambda shard: _header(model, shard), shards), strict=True)
        )
    if not weight_map:
        return headers[SINGLE_FILE]
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ModelError(
                f"{name} is not in {shard} of {model.repo}, though {INDEX_FILE} says so: the "
                "repository's files are of different checkpoints; give another revision"
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _fetch_model_files(repo: str, revision: str, weights: bool) -> Path:
    info = HfApi().model_info(repo, revision=revision)
    if info.sha is None:
        raise ModelError(f"{repo}: {constants.ENDPOINT} names no commit: check HF_ENDPOINT")
    model = HubModel(repo=repo, commit=info.sha)
    names = [sibling.rfilename for sibling in info.siblings or ()]
    if weights:
        _refuse_other_files(repo, names)
    for name in sorted(DRIVER_FILES.intersection(names)):
        if not (cached_folder(model) / name).exists():
            fetch_file(remote_file(model, name))
    remember_revision(model, revision)
    return cached_folder(model)


def _refuse_other_files(repo: str, names: Collection[str]) -> None:
    if INDEX_FILE in names or SINGLE_FILE in names or "adapter_config.json" in names:
        return
    if any(name.endswith(".gguf") for name in names):
        raise ModelError(
            f"{repo} has GGUF files, no {SINGLE_FILE}: download one, and make a folder of it with "
            "`orca-dist model convert`"
        )
    if any(name.endswith(PICKLES) for name in names):
        raise ModelError(
            f"{repo} has PyTorch pickles only, which can run any code when opened: look for a "
            "revision or repository with safetensors (--revision refs/pr/N, where somebody "
            "proposed them), or convert the files yourself if you trust them (transformers: "
            "from_pretrained, then save_pretrained) and give that folder"
        )
    raise ModelError(f"{repo} holds no weights: needs {SINGLE_FILE}, or shards with {INDEX_FILE}")


def _unreachable(error: BaseException | None) -> bool:
    """Whether the network is at fault, rather than what was asked for."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, OfflineModeIsEnabled | HTTPError)


def _shard_names(model: HubModel) -> dict[str, str]:
    """Tensor -> shard, of the index; empty for a model of one file."""
    folder = cached_folder(model)
    if not (folder / INDEX_FILE).exists():
        if (folder / SINGLE_FILE).exists():
            return {}
        index = _index(model)
        if index is None:
            return {}
        fetch_file(index)
    return read_weight_map(folder / INDEX_FILE)


def _index(model: HubModel) -> RemoteFile | None:
    try:
        return remote_file(model, INDEX_FILE)
    except ModelError as error:
        if isinstance(error.__context__, EntryNotFoundError):
            return None
        raise


def _header(model: HubModel, shard: str) -> dict[str, TensorHeader]:
    path = cached_folder(model) / shard
    if path.exists():
        return read_shard(path)
    try:
        with hub_errors(model.repo, shard):
            found = HfApi().parse_safetensors_file_metadata(
                model.repo, shard, revision=model.commit
            )
    except SafetensorsParsingError as error:
        problem = " ".join(str(error).split())
        raise ModelError(f"{model.repo}: {shard} is damaged: {problem}") from None
    return {
        name: make_header(shard, tensor.dtype, tuple(tensor.shape))
        for name, tensor in found.tensors.items()
    }


def _adding(before: int, total: int, on_bytes: OnBytes) -> Callable[[int], None]:
    return lambda position: on_bytes(before + position, total)
