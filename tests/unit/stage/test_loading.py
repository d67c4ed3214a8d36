"""While a stage reads its weights it says how far it is, and the master adds all stages up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orca_dist.core import split_layers
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.engine.pipeline import Pipeline
from orca_dist.proto.v1 import control_pb2 as pb
from orca_dist.spec import load_spec
from orca_dist.stage.weights import StageWeights
from orca_dist.stage.worker import StageWorker
from orca_dist.weights.checkpoint import Checkpoint
from orca_dist.weights.headers import INDEX_FILE, tensor_names
from orca_dist.weights.names import stage_tensors, tensor_shapes
from orca_dist.weights.progress import load_progress
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import stage_setup
from tests.unit.engine.test_settle import settled


def test_a_stage_tells_the_bytes_of_its_own_tensors(tmp_path: Path) -> None:
    folder = loud_llama(tmp_path / "loud")
    told: list[tuple[int, int]] = []
    setup = stage_setup(folder, 1, split_layers(5, 3), "float32")
    loaded = StageWorker(host="127.0.0.1").load(
        setup, lambda done, total: told.append((done, total))
    )
    done = [each for each, _ in told]
    assert done == sorted(set(done))
    assert {total for _, total in told} == {done[-1]} == {loaded.weight_bytes}


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_reads_its_own_bytes_and_no_others(tmp_path: Path, stage: int, dtype: str) -> None:
    """As the kernel counts them: its tensors, and the headers of their files."""
    folder = loud_llama(tmp_path / "loud", hidden_size=512, max_shard_size="2MB")
    spec = load_spec(folder)
    names = stage_tensors(spec, split_layers(5, 3)[stage], tensor_names(folder))
    before = bytes_read()
    checkpoint = Checkpoint(folder, names.values())
    for name in names.values():
        checkpoint.tensor(name, dtype=getattr(torch, dtype), device=torch.device("cpu"))
    read = bytes_read() - before
    own = sum(checkpoint.headers[name].num_bytes for name in names.values())
    assert checkpoint.bytes_read == own
    assert own <= read <= 1.01 * own + (folder / INDEX_FILE).stat().st_size


def bytes_read() -> int:
    """By this process, from files and pipes."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def test_time_starts_anew_while_weights_arrive() -> None:
    """A model of any size may be fetched; a stage that tells nothing is still found."""
    pipeline = Pipeline(settled(stages=2, device="cpu", start_timeout_s=50.0), LocalPlacement())
    pipeline._start_deadline()
    first = pipeline._deadline
    pipeline._note((0, pb.StageMessage(load_progress=pb.LoadProgress(done_bytes=1, total_bytes=9))))
    assert pipeline._deadline > first


def test_made_up_weights_are_the_same_on_any_number_of_stages(tmp_path: Path) -> None:
    folder = loud_llama(tmp_path / "loud", tie=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    spec = load_spec(folder)
    whole = made_up(folder, [range(5)], 0)
    parts = [made_up(folder, split_layers(5, 3), stage) for stage in range(3)]
    assert set().union(*parts) == set(whole)
    assert all(torch.equal(part[name], whole[name]) for part in parts for name in part)
    shapes = tensor_shapes(spec, {name: name for name in whole})
    assert all(whole[name].shape == shapes[name] for name in whole)
    assert torch.equal(whole["embed"], whole["lm_head"])
    assert not torch.equal(whole["layers.0.q"], whole["layers.1.q"])
    assert torch.equal(whole["final_norm"], torch.ones(64))


def made_up(folder: Path, layers: list[range], stage: int) -> dict[str, torch.Tensor]:
    setup = stage_setup(folder, stage, layers, "float32")
    setup.load_format = "dummy"
    weights = StageWeights(setup, torch.device("cpu"))
    weights.fetch(lambda done, total: None)
    return weights.read(lambda done, total: None)


def test_the_master_adds_all_stages_up() -> None:
    pipeline = Pipeline(settled(stages=2, device="cpu"), LocalPlacement())
    told: list[tuple[int, int]] = []
    pipeline._on_load = lambda done, total: told.append((done, total))
    for stage, done, total in [(0, 10, 100), (1, 5, 50), (0, 100, 100), (1, 50, 50)]:
        progress = pb.LoadProgress(done_bytes=done, total_bytes=total)
        pipeline._note((stage, pb.StageMessage(load_progress=progress)))
    assert told == [(10, 100), (15, 150), (105, 150), (150, 150)]


def test_the_bar_appears_with_the_first_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with load_progress("loading"):
        pass
    assert capsys.readouterr().err == ""
    with load_progress("loading") as on_load:
        on_load(500_000, 2_000_000)
        on_load(2_000_000, 2_000_000)
    shown = capsys.readouterr()
    assert "loading" in shown.err
    assert "2.0/2.0 MB" in shown.err
    assert shown.out == ""
