"""Models of the Hub, from one on loopback: what is fetched, by whom, and what goes wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from orca_dist.cli.main import main
from orca_dist.cli.settings import load_settings
from orca_dist.config import EngineConfig, LoadFormat
from orca_dist.core import split_layers
from orca_dist.errors import ConfigError, ModelError
from orca_dist.llm import resolve_model
from orca_dist.spec import load_spec
from orca_dist.stage.worker import StageWorker
from orca_dist.weights import check_folder, describe
from orca_dist.weights.headers import INDEX_FILE
from orca_dist.weights.hub import OnBytes, fetch_stage_weights, fetch_weights, stage_config
from orca_dist.weights.hub_files import PARTIAL_SUFFIX, cached_folder
from orca_dist.weights.names import stage_tensors
from orca_dist.weights.source import (
    HubModel,
    check_source,
    hub_model,
    is_repo_id,
    parse_source,
    source_name,
    source_of,
)
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.disk import largest_file
from tests.fixtures.hub import COMMIT, REPO, LoopbackHub, loopback_hub, use_hub
from tests.fixtures.thread_pipeline import stage_setup

MODEL = HubModel(repo=REPO, commit=COMMIT)
SINGLE = "model.safetensors"
NUM_STAGES = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards and an index."""
    return loud_llama(tmp_path_factory.mktemp("loud"), max_shard_size="150KB")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("single"), num_layers=1)


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as hub:
        hub.repos[REPO] = Path(shutil.copytree(saved, tmp_path / "repo"))
        use_hub(hub, tmp_path / "hf" / "hub", monkeypatch)
        yield hub


def serve_single(hub: LoopbackHub, single: Path) -> bytes:
    """The repository as one file of weights, whose bytes are returned."""
    shutil.rmtree(hub.repos[REPO])
    shutil.copytree(single, hub.repos[REPO])
    return (single / SINGLE).read_bytes()


def layers_of(stage: int) -> range:
    return split_layers(5, NUM_STAGES)[stage]


def shards_of(folder: Path, layers: range) -> dict[str, int]:
    """Shard -> bytes, of those that hold tensors of `layers`."""
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    names = stage_tensors(load_spec(folder), layers, weight_map).values()
    return {s: (folder / s).stat().st_size for s in {weight_map[name] for name in names}}


def leftovers() -> list[str]:
    return [path.name for path in Path(constants.HF_HUB_CACHE).rglob(f"*{PARTIAL_SUFFIX}")]


def here(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def refusal(problem: str, config: EngineConfig = EngineConfig(), model: str = REPO) -> None:  # noqa: B008
    with pytest.raises(ModelError, match=problem) as caught:
        resolve_model(model, config)
    assert "\n" not in str(caught.value)


# ---- names -------------------------------------------------------------


def test_ids_and_folders_are_told_apart() -> None:
    assert is_repo_id("org/name")
    assert is_repo_id("Qwen/Qwen2.5-0.5B_x")
    for text in ("name", "a/b/c", "/abs/path", "./a", "../a", "a/", "~/a", "org/-x", "a b/c"):
        assert not is_repo_id(text)
    assert parse_source(str(MODEL)) == MODEL
    assert parse_source("/models/org/name") is None
    assert source_name(str(MODEL)) == REPO
    assert source_name("/models/tiny") == "tiny"


def test_a_folder_is_told_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages on other nodes, or in other folders, must find it."""
    monkeypatch.chdir(tmp_path)
    assert source_of(Path("m")) == str(tmp_path / "m")


def test_a_snapshot_in_another_place_is_a_plain_folder(
    hub: LoopbackHub, saved: Path, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "models--tiny--loud" / "snapshots" / COMMIT
    shutil.copytree(saved, other)
    assert hub_model(other) is None
    assert source_of(other) == str(other)
    check_source(other, load_spec(other))
    assert hub.requests == 0


def test_a_folder_here_wins_over_an_id(
    hub: LoopbackHub, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(single, tmp_path / REPO)
    assert resolve_model(REPO) == tmp_path / REPO
    with pytest.raises(ConfigError, match=r"revision = v1: .* tiny/loud is a folder"):
        resolve_model(REPO, EngineConfig(revision="v1"))


# ---- who fetches what --------------------------------------------------


def test_the_driver_fetches_small_files_and_reads_headers(hub: LoopbackHub) -> None:
    folder = resolve_model(REPO)
    assert hub_model(folder) == MODEL
    assert source_of(folder) == str(MODEL)
    spec = load_spec(folder)
    headers = check_source(folder, spec)
    assert here(folder) == set()
    assert (folder / "tokenizer.json").read_bytes() == (
        hub.repos[REPO] / "tokenizer.json"
    ).read_bytes()
    assert headers == check_folder(hub.repos[REPO], spec)
    assert describe(folder)["parameters"] == describe(hub.repos[REPO])["parameters"]


def test_each_stage_fetches_the_shards_of_its_layers(hub: LoopbackHub, saved: Path) -> None:
    """With a cache of its own, as on another node: config and index come too."""
    for stage in range(NUM_STAGES):
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        hub.sent.clear()
        wanted = shards_of(saved, layers_of(stage))
        assert len(wanted) < 6
        folder = stage_config(MODEL)
        told: list[tuple[int, int]] = []
        fetched = fetch_stage_weights(MODEL, layers_of(stage), _noting(told))
        assert here(folder) == set(wanted)
        assert fetched == sum(wanted.values())
        sent = {name: n for name, n in hub.sent.items() if name.endswith(".safetensors")}
        assert sent == wanted
        assert told[-1] == (fetched, fetched)
        assert {name for name in hub.sent if name not in wanted} == {"config.json", INDEX_FILE}


def _noting(told: list[tuple[int, int]]) -> OnBytes:
    return lambda done, total: told.append((done, total))


def test_what_is_here_is_not_fetched_again(hub: LoopbackHub) -> None:
    stage_config(MODEL)
    fetch_stage_weights(MODEL, layers_of(0), lambda *_: None)
    before = hub.requests
    assert stage_config(MODEL) == cached_folder(MODEL)
    assert fetch_stage_weights(MODEL, layers_of(0), lambda *_: None) == 0
    assert hub.requests == before


@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_a_stage_loads_with_nothing_but_the_name(hub: LoopbackHub, saved: Path, stage: int) -> None:
    layers = split_layers(5, NUM_STAGES)
    setup = stage_setup(saved, stage, layers, "float32")
    local = StageWorker(host="127.0.0.1").load(setup)
    setup.model = str(MODEL)
    loaded = StageWorker(host="127.0.0.1").load(setup)
    assert loaded.fetched_bytes == sum(shards_of(saved, layers[stage]).values())
    assert local.fetched_bytes == 0
    assert (loaded.weight_bytes, loaded.read_bytes) == (local.weight_bytes, local.read_bytes)


def test_a_model_of_one_file(hub: LoopbackHub, single: Path) -> None:
    weights = serve_single(hub, single)
    folder = resolve_model(REPO)
    check_source(folder, load_spec(folder))
    assert fetch_stage_weights(MODEL, range(1), lambda *_: None) == len(weights)
    assert check_folder(folder, load_spec(folder))


def test_the_cache_is_the_librarys_own(hub: LoopbackHub) -> None:
    """What the library fetched is used; what we fetched it finds."""
    config = Path(hf_hub_download(REPO, "config.json"))
    assert config.parent == cached_folder(MODEL)
    folder = resolve_model(REPO)
    fetch_weights(MODEL)
    before = hub.requests
    for name in [*here(folder), "tokenizer.json"]:
        assert hf_hub_download(REPO, name, local_files_only=True) == str(folder / name)
    assert hub.requests == before


def test_a_revision_is_taken(hub: LoopbackHub) -> None:
    assert resolve_model(REPO, EngineConfig(revision="v1")) == cached_folder(MODEL)
    assert resolve_model(REPO, EngineConfig(revision=COMMIT)) == cached_folder(MODEL)
    refusal(r"tiny/loud has no revision v9 \(404", EngineConfig(revision="v9"))


def test_code_that_comes_with_a_model_is_left_alone(hub: LoopbackHub) -> None:
    path = hub.repos[REPO] / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_x.M"}}))
    (hub.repos[REPO] / "modeling_x.py").write_text("raise SystemExit")
    folder = resolve_model(REPO)
    assert load_spec(folder).model_type == "llama"
    assert not (folder / "modeling_x.py").exists()


# ---- what goes wrong ---------------------------------------------------


def test_a_token_is_needed(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_right"
    refusal(
        r"tiny/loud can't be read \(401 from http://127\.0\.0\.1:\d+\): it is private.*HF_TOKEN"
    )
    hub.gated = True
    refusal(r"tiny/loud is gated \(401 .*ask for access.*HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    fetch_stage_weights(hub_model(resolve_model(REPO)) or MODEL, layers_of(0), lambda *_: None)


def test_a_repository_that_does_not_exist(hub: LoopbackHub) -> None:
    refusal(r"no/such does not exist \(404 .*no folder here either", model="no/such")


def test_a_hub_that_does_not_answer(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was fetched it is said; after that, what is here does."""
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    refusal(rf"can't be fetched from {nowhere}: ConnectError.*check the network")
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    folder = resolve_model(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    assert resolve_model(REPO) == folder


def test_offline(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refusal(r"tiny/loud: main is not in the cache .*HF_HUB_OFFLINE is set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = resolve_model(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(REPO) == folder
    with pytest.raises(ModelError, match=r"model-0000\d-of-00006.safetensors is not in the cache"):
        fetch_stage_weights(MODEL, layers_of(0), lambda *_: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch_weights(MODEL)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_source(resolve_model(REPO), load_spec(folder))
    assert fetch_stage_weights(MODEL, layers_of(0), lambda *_: None) == 0


def test_a_cut_connection_is_taken_up_at_once(hub: LoopbackHub, single: Path) -> None:
    weights = serve_single(hub, single)
    hub.cuts[SINGLE] = [50_000]
    assert fetch_weights(MODEL) == len(weights)
    assert hub.ranges[-2:] == [(SINGLE, ""), (SINGLE, "bytes=50000-")]
    assert (cached_folder(MODEL) / SINGLE).read_bytes() == weights


def test_a_second_try_goes_on_where_the_first_was_cut(hub: LoopbackHub, single: Path) -> None:
    weights = serve_single(hub, single)
    hub.cuts[SINGLE] = [50_000, *[0] * 6]
    with pytest.raises(ModelError, match=r"model\.safetensors can't be fetched.*is kept") as caught:
        fetch_weights(MODEL)
    assert "\n" not in str(caught.value)
    assert here(cached_folder(MODEL)) == set()
    assert len(leftovers()) == 1
    hub.cuts.clear()
    hub.sent.clear()
    assert fetch_weights(MODEL) == len(weights)
    assert hub.sent[SINGLE] == len(weights) - 50_000
    assert (cached_folder(MODEL) / SINGLE).read_bytes() == weights
    assert leftovers() == []


@pytest.mark.parametrize("change", ["other bytes", "fewer", "more"])
def test_other_bytes_than_announced_are_thrown_away(
    hub: LoopbackHub, single: Path, change: str
) -> None:
    weights = serve_single(hub, single)
    wrong = {"other bytes": weights[:-1] + b"\1", "fewer": weights[:-9], "more": weights + b"\0"}
    hub.swaps[SINGLE] = wrong[change]
    what = r"hash [0-9a-f]{64}" if change == "other bytes" else rf"{len(wrong[change])} bytes"
    with pytest.raises(
        ModelError, match=rf"{SINGLE} came with {what}, must be .*removed"
    ) as caught:
        fetch_weights(MODEL)
    assert "\n" not in str(caught.value)
    assert (here(cached_folder(MODEL)), leftovers()) == (set(), [])
    hub.swaps.clear()
    fetch_weights(MODEL)
    assert (cached_folder(MODEL) / SINGLE).read_bytes() == weights


def test_a_small_file_is_checked_too(hub: LoopbackHub) -> None:
    config = (hub.repos[REPO] / "config.json").read_bytes()
    hub.swaps["config.json"] = config.replace(b"5", b"6")
    refusal(r"config\.json came with hash [0-9a-f]{40}, must be")


def test_a_full_disk_leaves_nothing_and_a_second_try_works(hub: LoopbackHub, single: Path) -> None:
    weights = serve_single(hub, single)
    resolve_model(REPO)
    with (
        largest_file(50_000),
        pytest.raises(ModelError, match=r"model\.safetensors can't be written: the disk is full"),
    ):
        fetch_weights(MODEL)
    assert (here(cached_folder(MODEL)), leftovers()) == (set(), [])
    fetch_weights(MODEL)
    assert (cached_folder(MODEL) / SINGLE).read_bytes() == weights


def test_pickles_are_refused_before_anything_is_fetched(hub: LoopbackHub) -> None:
    folder = hub.repos[REPO]
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refusal(r"tiny/loud has PyTorch pickles only.*any code.*--revision.*from_pretrained")
    assert not hub.sent
    resolve_model(REPO, EngineConfig(load_format=LoadFormat.DUMMY))
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    refusal(r"tiny/loud has GGUF files.*orca-dist model convert")


def test_an_adapter_is_refused(hub: LoopbackHub) -> None:
    (hub.repos[REPO] / "adapter_config.json").write_text("{}")
    folder = resolve_model(REPO)
    with pytest.raises(ModelError, match="LoRA adapter"):
        load_spec(folder)


def test_a_shard_of_another_checkpoint_is_found_before_a_stage_starts(hub: LoopbackHub) -> None:
    index = hub.repos[REPO] / INDEX_FILE
    document = json.loads(index.read_text())
    names = sorted(document["weight_map"])
    document["weight_map"][names[0]] = document["weight_map"][names[-1]]
    index.write_text(json.dumps(document))
    folder = resolve_model(REPO)
    with pytest.raises(ModelError, match=rf"{names[0]} is not in model-0000\d"):
        check_source(folder, load_spec(folder))


def test_a_damaged_shard_is_found_before_a_stage_starts(hub: LoopbackHub) -> None:
    shard = sorted(here(hub.repos[REPO]))[2]
    (hub.repos[REPO] / shard).write_bytes(b"\xff" * 100)
    folder = resolve_model(REPO)
    with pytest.raises(ModelError, match=rf"{shard} is damaged"):
        check_source(folder, load_spec(folder))


def test_two_fetchers_of_one_file_make_it_once(hub: LoopbackHub, single: Path) -> None:
    weights = serve_single(hub, single)
    stage_config(MODEL)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch_weights(MODEL), range(4)))
    assert hub.sent[SINGLE] == len(weights)


# ---- commands ----------------------------------------------------------


def test_model_fetch_takes_an_id(hub: LoopbackHub, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", REPO, "--revision", "v1"]) == 0
    folder = Path(capfd.readouterr().out.strip())
    assert folder == cached_folder(MODEL)
    check_folder(folder, load_spec(folder))


def test_model_show_takes_an_id_and_fetches_no_weights(
    hub: LoopbackHub, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "show", REPO, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert main(["model", "show", str(hub.repos[REPO]), "--json"]) == 0
    local = json.loads(capfd.readouterr().out)
    assert facts.pop("folder") == str(cached_folder(MODEL))
    assert facts == {name: value for name, value in local.items() if name != "folder"}
    assert here(cached_folder(MODEL)) == set()


@pytest.mark.parametrize("arguments", [["--trust-remote-code"], ["--trust_remote_code=True"]])
def test_remote_code_is_refused_by_name(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", REPO, *arguments]) == 2
    assert re.fullmatch(
        r"error: --trust.remote.code: there is no such setting: code that .*never run.*\n",
        capfd.readouterr().err,
    )


def test_remote_code_is_refused_in_a_file_and_as_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("trust_remote_code: true\n")
    with pytest.raises(ConfigError, match="trust_remote_code: there is no such setting"):
        load_settings({}, path)
    with pytest.raises(ConfigError, match="ORCA_TRUST_REMOTE_CODE: there is no such setting"):
        load_settings({"ORCA_TRUST_REMOTE_CODE": "1"}, None)
