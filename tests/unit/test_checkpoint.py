"""Checkpoint folders: whole ones read exactly, every other one refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orca_dist.errors import ModelError
from orca_dist.spec import load_spec
from orca_dist.weights import check_folder, describe, read_headers, stage_tensors
from orca_dist.weights.checkpoint import Checkpoint
from orca_dist.weights.headers import INDEX_FILE, SINGLE_FILE
from tests.fixtures.checkpoints import loud_llama, loud_model

CPU = torch.device("cpu")
SHARD_4 = "model-00004-of-00006.safetensors"
SHARD_6 = "model-00006-of-00006.safetensors"
NORM = "model.norm.weight"
Q_0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards and an index."""
    return loud_llama(tmp_path_factory.mktemp("loud"), max_shard_size="150KB")


@pytest.fixture(scope="module")
def tensors(saved: Path) -> dict[str, torch.Tensor]:
    shards = (load_file(path) for path in sorted(saved.glob("*.safetensors")))
    return {name: tensor for shard in shards for name, tensor in shard.items()}


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def check(folder: Path) -> None:
    check_folder(folder, load_spec(folder))


def single(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """`folder` with its shards replaced by one file of `tensors`."""
    for path in [*folder.glob("model*.safetensors"), folder / INDEX_FILE]:
        path.unlink()
    save_file(tensors, folder / SINGLE_FILE)
    return folder


def edit_index(folder: Path, **changes: str) -> None:
    document = json.loads((folder / INDEX_FILE).read_text())
    document["weight_map"] |= changes
    (folder / INDEX_FILE).write_text(json.dumps(document))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    return read(checkpoint, *checkpoint.names())


def read(checkpoint: Checkpoint, *names: str) -> dict[str, torch.Tensor]:
    return {name: checkpoint.tensor(name, dtype=torch.float32, device=CPU) for name in names}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_whole_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    Checkpoint(folder).check(load_spec(folder))
    assert_same(read_all(folder), tensors)


def test_a_missing_shard_is_named_whoever_needs_it(folder: Path) -> None:
    (folder / SHARD_4).unlink()
    for attempt in (check, Checkpoint):
        with pytest.raises(ModelError, match=rf"{SHARD_4} is missing"):
            attempt(folder)


@pytest.mark.parametrize("shard", [SHARD_4, SHARD_6])
def test_a_cut_shard_is_named(folder: Path, shard: str) -> None:
    whole = (folder / shard).read_bytes()
    for size in (len(whole) - 100, 20, 0):
        (folder / shard).write_bytes(whole[:size])
        with pytest.raises(ModelError, match=rf"{shard} is cut short or damaged \({size} bytes"):
            check(folder)


def test_a_stray_file_is_ignored(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(zeros, folder / "consolidated.safetensors")
    check(folder)
    assert_same(read_all(folder), tensors)
    assert_same(read_all(single(folder, tensors)), tensors)


def test_shards_without_an_index(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    (folder / INDEX_FILE).unlink()
    check(folder)
    assert_same(read_all(folder), tensors)
    (folder / SHARD_4).unlink()
    with pytest.raises(ModelError, match=rf"{SHARD_4} is missing"):
        check(folder)


def test_shards_of_two_checkpoints_without_an_index(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    shutil.copy(folder / SHARD_4, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match="mixes shards of several checkpoints"):
        check(folder)


def test_the_same_tensor_twice_without_an_index(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    shutil.copy(folder / SHARD_4, folder / SHARD_6)
    with pytest.raises(ModelError, match=rf"is in both {SHARD_4} and {SHARD_6}"):
        check(folder)


def test_an_index_that_names_a_tensor_its_shard_lacks(folder: Path) -> None:
    edit_index(folder, **{NORM: SHARD_4})
    with pytest.raises(ModelError, match=rf"model\.norm\.weight is not in .*{SHARD_4}"):
        check(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": "../a"}}'])
def test_a_damaged_index_is_named(folder: Path, content: str) -> None:
    (folder / INDEX_FILE).write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        check(folder)


def test_a_missing_tensor_is_named(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    rest = {name: tensor for name, tensor in tensors.items() if name != Q_0}
    with pytest.raises(ModelError, match=rf"{Q_0} is missing"):
        check(single(folder, rest))


def test_an_untied_model_without_a_head(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    rest = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        check(single(folder, rest))


def test_a_tied_model_is_saved_without_a_head(tmp_path: Path) -> None:
    check(loud_llama(tmp_path, num_layers=1, tie=True))
    assert "lm_head.weight" not in Checkpoint(tmp_path).names()


def test_a_wrong_shape_gives_both(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    wrong = {**tensors, NORM: torch.zeros(65)}
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\[65\].*\[64\]"):
        check(single(folder, wrong))


def test_dtypes_may_mix(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    mixed = {name: t.to(kinds[i % 3]) for i, (name, t) in enumerate(tensors.items())}
    check(single(folder, mixed))
    assert_same(read_all(folder), {name: tensor.float() for name, tensor in mixed.items()})


def test_a_quantised_tensor_is_refused(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    eight_bit = {**tensors, Q_0: tensors[Q_0].to(torch.float8_e4m3fn)}
    with pytest.raises(ModelError, match=rf"{Q_0} in {SINGLE_FILE} is F8_E4M3.*supported: F32"):
        check(single(folder, eight_bit))


def test_a_stage_reads_its_own_tensors_only(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    spec, checkpoint = load_spec(folder), Checkpoint(folder)
    names = set(stage_tensors(spec, range(2, 3), checkpoint.names()).values())
    own = {checkpoint.headers[name].shard for name in names}
    for path in folder.glob("*.safetensors"):
        if path.name not in own:
            path.unlink()  # opening another shard would fail now
    assert 0 < len(own) < 6
    assert_same(read(checkpoint, *names), {name: tensors[name] for name in names})
    assert checkpoint.bytes_read == sum(tensors[name].nbytes for name in names)


def test_bytes_are_counted_as_they_are_stored(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    checkpoint.tensor(NORM, dtype=torch.bfloat16, device=CPU)
    assert checkpoint.bytes_read == 64 * 4


def test_tensors_outlive_the_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    norm = read(Checkpoint(folder), NORM)[NORM]
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    assert torch.equal(norm, tensors[NORM])


def test_an_unknown_name_or_a_vanished_shard_is_named(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    with pytest.raises(ModelError, match="no_such_tensor is missing"):
        read(checkpoint, "no_such_tensor")
    shard = checkpoint.headers[NORM].shard
    (folder / shard).unlink()
    with pytest.raises(ModelError, match=rf"{shard} can't be read"):
        read(checkpoint, NORM)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pytorch_model.bin", "PyTorch pickles only"),
        ("model.gguf", "orca-dist model convert"),
        ("adapter_config.json", "LoRA adapter"),
        ("README.md", "holds no weights"),
    ],
)
def test_folders_of_another_kind(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelError, match=problem):
        read_headers(tmp_path)


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        read_headers(tmp_path / "gone")


def test_describe_counts_what_is_there(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    facts = describe(folder)
    assert facts["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert facts["weights_bytes"] == 4 * facts["parameters"]
    assert facts["tensors_by_dtype"] == {"F32": len(tensors)}
    assert (facts["num_layers"], len(facts["shards"])) == (5, 6)


def test_describe_tells_of_rope_what_its_type_uses(tmp_path: Path) -> None:
    parameters = {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}
    config = {"model_type": "llama", "num_hidden_layers": 1, "rope_parameters": parameters}
    facts = describe(loud_model(tmp_path / "m", config))
    assert facts["rope"] == {"rope_type": "linear", "theta": 5e5, "factor": 4.0}
    assert str(facts["rope"]).startswith("{'rope_type': 'linear'")  # as `model show` prints it


def test_checking_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys, pathlib; from orca_dist.weights import describe; "
        "describe(pathlib.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert done.returncode == 0
