"""Decodes on CPUs are recorded once and replayed: the same bits, whatever plan comes.

Stages compute with the C++ kernels; beside each replay its plan runs without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from orca_kernels.cpu.rows import CpuRows
from orca_kernels.cpu.tape import Tape, capture
from orca_kernels.dispatch import cpu_kernels
from orca_kernels.linear import TorchLinear

from orca_dist.engine.kv_size import tape_bytes
from orca_dist.spec import load_spec, parse_spec
from orca_dist.stage.batch import PackedBatch
from orca_dist.stage.worker import StageWorker
from tests.fixtures.checkpoints import TINY_SIZES
from tests.fixtures.cpu_library import cpu_library
from tests.fixtures.families import VARIANTS
from tests.fixtures.graph_stage import begin, caches, graphs_of, new_requests, packed, scattered
from tests.fixtures.large_models import config_folder
from tests.fixtures.thread_pipeline import BLOCK_SIZE, stage_setup

NUM_BLOCKS = 128
MAX_ROWS = 8
MAX_START = 60


def has_experts(name: str) -> bool:
    return parse_spec({**TINY_SIZES, **VARIANTS[name]}).experts is not None


FAMILIES = [name for name in VARIANTS if not has_experts(name)]


def stage(tmp_path: Path, name: str, dtype: str = "float32", **sizes: int) -> StageWorker:
    """All of a small model, with noise for KV."""
    folder = config_folder(tmp_path, {**TINY_SIZES, **VARIANTS[name], **sizes})
    worker = StageWorker(host="127.0.0.1")
    setup = stage_setup(folder, 0, [range(load_spec(folder).num_layers)], dtype)
    setup.load_format, setup.graph_rows, setup.num_threads = "dummy", MAX_ROWS, 2
    worker.load(setup)
    begin(worker, NUM_BLOCKS)
    return worker


def decodes(worker: StageWorker, starts: Sequence[int], first_id: int) -> PackedBatch:
    spans = [(start, 1) for start in starts]
    return packed(
        worker,
        new_requests(spans, scattered(spans, BLOCK_SIZE, NUM_BLOCKS, first_id), first_id=first_id),
    )


@torch.inference_mode()
def computed(worker: StageWorker, batch: PackedBatch) -> list[torch.Tensor]:
    """What leaves the layers, and what KV holds then, but for the scratch block."""
    x_TH = worker.compute(worker._decoder.embed(batch.token_ids_T), batch)
    return [x_TH, *(cache[:NUM_BLOCKS].clone() for cache in caches(worker))]


def same_bits(worker: StageWorker, starts: Sequence[int], first_id: int) -> None:
    batch = decodes(worker, starts, first_id)
    assert batch.graph is not None
    before = [cache.clone() for cache in caches(worker)]
    wanted = computed(worker, replace(batch, graph=None))
    for cache, kept in zip(caches(worker), before, strict=True):
        cache.copy_(kept)
    got = computed(worker, batch)
    assert not torch.equal(wanted[1], before[0][:NUM_BLOCKS]), "its own keys are written"
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_replays_have_the_bits_of_calls(tmp_path: Path, name: str, dtype: str) -> None:
    worker = stage(tmp_path, name, dtype)
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 3, 1, 3, 3):
        starts = torch.randint(MAX_START, (num_rows,), generator=generator).tolist()
        same_bits(worker, starts, first_id=10 * (1 + worker.num_requests))
    assert graphs_of(worker).sizes == [(1,), (4,)]


def test_each_number_of_rows_has_them(tmp_path: Path) -> None:
    worker = stage(tmp_path, "llama")
    for num_rows in range(1, MAX_ROWS + 1):
        same_bits(worker, range(3, 3 + num_rows), first_id=100 * num_rows)
    assert graphs_of(worker).sizes == [(1,), (2,), (4,), (8,)]


def test_matmuls_of_torch_are_replayed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU multiplies bfloat16 they are oneDNN's."""
    kernels = replace(cpu_kernels(torch.bfloat16, 2), linear=TorchLinear)
    monkeypatch.setattr("orca_dist.stage.worker.kernels_for", lambda *_: kernels)
    worker = stage(tmp_path, "llama", "bfloat16")
    for first_id, starts in ((10, [5, 40]), (20, [17, 3])):
        same_bits(worker, starts, first_id)


def test_layers_are_one_call(tmp_path: Path) -> None:
    """Torch has a part before them and behind them, and none in between."""
    num_steps = set()
    for num_layers in (2, 5):
        folder = tmp_path / str(num_layers)
        folder.mkdir()
        worker = stage(folder, "llama", num_hidden_layers=num_layers)
        batch = decodes(worker, [9], first_id=1)
        assert batch.graph is not None
        tape = Tape(cpu_library())
        with torch.inference_mode(), tape:
            graphs_of(worker)._work(batch.graph.padding)()
        num_steps.add(len(tape.steps))
    assert len(num_steps) == 1


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama", "bfloat16")])
def test_what_tapes_keep_is_counted(tmp_path: Path, name: str, dtype: str) -> None:
    """To the byte but for rotations, which are the same for all layers."""
    worker = stage(tmp_path, name, dtype)
    spec, itemsize = worker._spec, getattr(torch, dtype).itemsize
    kept_bytes = 0
    for num_rows in (1, 2, 4, 8):
        batch = decodes(worker, [5] * num_rows, first_id=100 * num_rows)
        assert batch.graph is not None
        tape = Tape(cpu_library())
        with torch.inference_mode(), tape:
            graphs_of(worker)._work(batch.graph.padding)()
        kept_bytes += tape.nbytes
    static_bytes = graphs_of(worker).nbytes + sum(cache[0].nbytes for cache in caches(worker))
    counted = tape_bytes(
        spec, rows=8, num_layers=spec.num_layers, itemsize=itemsize, block_size=BLOCK_SIZE
    )
    assert 0.95 * counted < kept_bytes + static_bytes < 1.05 * counted


@pytest.mark.parametrize(
    "asks",
    [lambda x: x * x.max().item(), lambda x: x if x.sum() > 0 else -x],
    ids=["a value", "a truth"],
)
@torch.inference_mode()
def test_work_that_asks_for_values_is_refused(
    asks: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"aten::\w+ asks for values"):
        capture(cpu_library(), lambda: asks(x))
    assert capture(cpu_library(), lambda: x * 2)().tolist() == [2, 2, 2], "and the next is not"


@torch.inference_mode()
def test_what_is_done_in_place_is_done_again() -> None:
    x = torch.ones(3)
    replay = capture(cpu_library(), lambda: (x * 2).add_(x))
    x.fill_(5.0)
    assert replay().tolist() == [15.0] * 3
    assert replay().tolist() == [15.0] * 3


@torch.inference_mode()
def test_other_threads_calls_are_their_own() -> None:
    library = cpu_library()
    rows, x, weight = CpuRows(library, 1), torch.ones(2, 16), torch.ones(16)
    theirs: list[torch.Tensor] = []

    @torch.inference_mode()
    def elsewhere() -> None:
        theirs.append(rows.rms_norm(x, weight, 0.0))

    def work() -> torch.Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return rows.rms_norm(x, weight, 0.0)

    replay = capture(library, work)
    assert theirs[0].eq(1.0).all()
    theirs[0].fill_(7.0)
    weight.fill_(2.0)
    assert replay().eq(2.0).all()
    assert theirs[0].eq(7.0).all()
