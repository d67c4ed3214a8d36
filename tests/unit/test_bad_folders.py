"""Model folders that can't be served are refused by name before any stage starts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from orca_dist.config import EngineConfig
from orca_dist.engine.engine import Engine
from orca_dist.errors import ModelError
from orca_dist.spec import load_spec
from orca_dist.weights import check_folder
from tests.fixtures.checkpoints import loud_llama

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], None]


class NoPlacement:
    """A place where nothing may be started."""

    control_host = "127.0.0.1"

    def launch(self, bootstraps: Sequence[object], on_death: object) -> None:
        raise AssertionError("a stage was started")

    def close(self) -> None:
        raise AssertionError("a placement was taken into use")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("saved"), num_layers=2)


def adapter(folder: Path) -> None:
    for path in (folder / "config.json", folder / WEIGHTS):
        path.unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    (folder / "adapter_model.safetensors").write_bytes(b"")


def adapter_beside_a_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")


def pickles_only(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def gguf_only(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "model.gguf")


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1)


def with_a_later_shard(folder: Path) -> Path:
    """Re-saves the weights in two shards with an index; returns the second, a later stage's."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    later = {name for name in tensors if ".layers.1." in name or name.startswith("lm_head")}
    weight_map = {name: shards[name in later] for name in tensors}
    for shard in shards:
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(held, folder / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder / shards[1]


def shard_deleted(folder: Path) -> None:
    with_a_later_shard(folder).unlink()


def shard_cut(folder: Path) -> None:
    shard = with_a_later_shard(folder)
    os.truncate(shard, shard.stat().st_size - 100)


def shard_without_a_tensor(folder: Path) -> None:
    shard = with_a_later_shard(folder)
    tensors = load_file(shard)
    del tensors["lm_head.weight"]
    save_file(tensors, shard)


def no_file(name: str) -> Damage:
    """A folder in its place: what nobody can read, root neither."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def config_with(**entries: object) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **entries}), encoding="utf-8")

    return damage


DAMAGES: Mapping[str, tuple[Damage, str]] = {
    "adapter": (adapter, r"LoRA adapter \(adapter_config\.json\): merge it"),
    "adapter beside a model": (adapter_beside_a_model, r"LoRA adapter"),
    "pickles": (pickles_only, r"PyTorch pickles only.*safetensors"),
    "GGUF": (gguf_only, r"config\.json does not exist.*orca-dist model convert"),
    "cut": (cut, r"model\.safetensors is cut short or damaged"),
    "a later stage's shard missing": (
        shard_deleted,
        r"model-00002-of-00002\.safetensors is missing",
    ),
    "a later stage's shard cut": (shard_cut, r"model-00002-of-00002\.safetensors is cut short"),
    "a tensor that only the index has": (shard_without_a_tensor, r"lm_head\.weight"),
    "unreadable weights": (no_file(WEIGHTS), r"model\.safetensors can't be read"),
    "unreadable config": (no_file("config.json"), r"config\.json can't be read"),
    "vision": (config_with(vision_config={"depth": 2}), r"vision_config.*text model"),
    "quantised": (
        config_with(quantization_config={"quant_method": "awq"}),
        r"quantization_config \(method awq\).*bf16",
    ),
    "of another family": (config_with(model_type="mamba"), r"model_type = 'mamba'.*supported"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_refused_before_anything_starts_and_served_once_repaired(
    saved: Path, tmp_path: Path, name: str
) -> None:
    damage, problem = DAMAGES[name]
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    damage(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(ModelError, match=problem) as caught:
        Engine.start(folder, EngineConfig(), placement=NoPlacement())
    assert "\n" not in str(caught.value)
    assert sorted(folder.iterdir()) == before
    shutil.rmtree(folder)
    shutil.copytree(saved, folder)
    check_folder(folder, load_spec(folder))
