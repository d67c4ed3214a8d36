"""Stages on a GPU that isn't there: shapes, bytes and what the host reads, of every family.

What is planned, what the engine counts with and what stages hold must be the same bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from orca_kernels import Kernels
from orca_kernels.dispatch import TORCH
from orca_kernels.triton import tiles
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from orca_dist.core import Plan, Sampling
from orca_dist.device.seam import Work
from orca_dist.device.staging import Uploads, download
from orca_dist.engine import kv_size
from orca_dist.sim.hardware import find_device
from orca_dist.sim.layouts import Cluster, Layout, Target
from orca_dist.sim.shapes import shape_of
from orca_dist.spec import FAMILIES, ModelSpec, load_spec, parse_spec
from tests.fixtures.checkpoints import TINY_SIZES
from tests.fixtures.fake_gpu import FakeGpu, HostCopy, HostRead
from tests.fixtures.families import VARIANTS
from tests.fixtures.large_models import LARGE, Config, config_folder
from tests.fixtures.launches import Launch, Place, noted_launches
from tests.fixtures.shape_run import MAX_TOKENS, ShapeRun, gpu_config, start

GPU = find_device("H100")
GPU_BYTES = int(GPU.memory_bytes)
TINY_BYTES = 50_000_000


@pytest.fixture
def triton() -> Iterator[Kernels]:
    with noted_launches() as (kernels, _):
        yield kernels


def names(table: Iterable[str], quick: Container[str]) -> list[ParameterSet]:
    """All of a table; those that aren't quick are slow."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in table]


# ---- what is read, and where -------------------------------------------

QUICK = (
    "llama, all biases",
    "mistral, window",
    "qwen2, upper windows",
    "qwen3",
    "smollm3, listed layers and windows",
    "granite",
    "olmo2",
    "gemma2",
    "mixtral, one of four and a window",
)


def kinds(plans: list[Plan]) -> set[str]:
    """Of batches: prompts alone, decodes alone, both."""
    found = set()
    for plan in plans:
        steps = zip(plan.starts, plan.lengths, strict=True)
        decodes = {start > 0 and length == 1 for start, length in steps}
        found.add({(True,): "decode", (False,): "prefill"}.get(tuple(decodes), "mixed"))
    return found


def serve(run: ShapeRun) -> None:
    """Batches of every kind go through; only the last stage reads, once for each that samples.

    And nothing but the tokens, of eight bytes each.
    """
    plans = run.serve([20, 3], [37])
    assert kinds(plans) == {"prefill", "decode", "mixed"}
    sampling = [plan for plan in plans if any(plan.samples)]
    assert sum(sum(plan.samples) for plan in sampling) == 3 * MAX_TOKENS
    reads = [stage.gpu.num_reads for stage in run.stages]
    assert reads == [0] * (len(run.stages) - 1) + [len(sampling)]
    assert run.stages[-1].gpu.read_bytes == 8 * 3 * MAX_TOKENS


def family(folder: Path, name: str) -> Path:
    return config_folder(folder, {**TINY_SIZES, **VARIANTS[name]})


@pytest.mark.parametrize("name", names(VARIANTS, QUICK))
def test_a_family_reads_nothing_but_its_tokens(tmp_path: Path, name: str, triton: Kernels) -> None:
    check(family(tmp_path, name), triton)


@pytest.mark.parametrize("name", names(VARIANTS, ["qwen3, biases and windows"]))
def test_nor_does_it_on_the_kernels_of_older_gpus(tmp_path: Path, name: str) -> None:
    check(family(tmp_path, name), TORCH)


def check(folder: Path, kernels: Kernels) -> None:
    run = start(folder, gpu_config(2), TINY_BYTES, kernels)
    same_bytes(run, folder)
    serve(run)


def test_a_plan_is_a_launch_of_each_kernel_a_layer(tmp_path: Path) -> None:
    """Norms before attention and MLP in 5 layers and before the head; nothing on the side."""
    with noted_launches() as (kernels, launches):
        run = start(decoder(tmp_path), gpu_config(1), TINY_BYTES, kernels)
        run.run_new([(0, 20), (64, 1), (600, 1)])
    counts = {name: names_of(launches).count(name) for name in names_of(launches)}
    assert counts == {
        "norm_rows": 2 * 5 + 1,
        "gate_rows": 5,
        "rotate_rows": 5,
        "attend_tiles": 5,
        "merge_chunks": 5,
        "sample_rows": 1,
    }


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_logits_are_read_where_they_are_asked_for(
    tmp_path: Path, kernels: str, triton: Kernels
) -> None:
    """One row for each token of the entry; filters read nothing."""
    folder = family(tmp_path, "llama")
    kind = TORCH if kernels == "torch" else triton
    run, vocab_size = start(folder, gpu_config(1), TINY_BYTES, kind), load_spec(folder).vocab_size
    (stage,) = run.stages
    run.run_new([(0, 3), (64, 1)], Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01))
    assert stage.gpu.read_bytes == 2 * 8
    result = run.run_new([(0, 3), (64, 1)], Sampling(return_logits=True))
    assert stage.gpu.read_bytes == 4 * 8 + 4 * vocab_size * 4
    assert [len(logits.rows) for logits in result.logits] == [3 * vocab_size * 4, vocab_size * 4]


def names_of(launches: list[Launch]) -> list[str]:
    return [launch.kernel for launch in launches]


# ---- graphs ------------------------------------------------------------

LAUNCHED = ["norm_rows", "rotate_rows", "attend_tiles", "norm_rows", "gate_rows"]  # of a layer
MERGED = [*LAUNCHED[:3], "merge_chunks", *LAUNCHED[3:]]


def test_a_size_of_decodes_is_launched_once_and_then_replayed(tmp_path: Path) -> None:
    """Of a replay nothing is launched but the norm before the head, and the sampling behind it."""
    with noted_launches() as (kernels, launches):
        run = start(decoder(tmp_path), gpu_config(1), TINY_BYTES, kernels)
        captured = []
        for spans in ([(64, 1)] * 3, [(9, 1)] * 4, [(600, 1), (2, 1), (0, 1)], [(513, 1)] * 4):
            launches.clear()
            run.run_new(spans)
            captured.append(names_of(launches))
    gpu = run.stages[0].gpu
    head = ["norm_rows", "sample_rows"]
    assert captured == [[*LAUNCHED * 5, *head], head, [*MERGED * 5, *head], head]
    assert (gpu.num_captured, gpu.num_replays) == (2, 4)


def test_graphs_can_be_switched_off(tmp_path: Path, triton: Kernels) -> None:
    run = start(decoder(tmp_path), gpu_config(1, cuda_graphs="off"), TINY_BYTES, triton)
    run.run_new([(64, 1)])
    assert run.stages[0].worker._graphs is None
    assert run.stages[0].gpu.num_captured == 0


def decoder(folder: Path) -> Path:
    config = {**TINY_SIZES, "model_type": "llama", "max_position_embeddings": 1024}
    return config_folder(folder, config)


class TracedGpu(FakeGpu):
    """Keeps what each capture comes to: torch's operations by make_fx, and Triton's launches."""

    launches: list[Launch]

    def __init__(self, total_bytes: int, fake: FakeTensorMode) -> None:
        super().__init__(total_bytes, fake)
        self.traces: list[tuple[str, list[object], list[object]]] = []

    def capture(self, work: Work) -> Work:
        before = {storage._cdata: storage for storage in self.memory.storages()}  # kept meanwhile
        self.launches.clear()
        graph = make_fx(work)()
        outer = [Place.of(each) for _, each in sorted(graph.named_buffers())]
        given = [
            each for launch in self.launches for each in (launch.kernel, launch.grid, *launch.given)
        ]
        self.traces.append((graph.code, found(outer, before), found(given, before)))
        return super().capture(work)


def found(given: Iterable[object], before: Container[int]) -> list[object]:
    """What was made on the way may lie anywhere."""
    return [
        replace(each, storage=0) if isinstance(each, Place) and each.storage not in before else each
        for each in given
    ]


PAIRS = {
    "short": ([(64, 1), (3, 1), (0, 1)], [(9, 1), (511, 1), (100, 1), (2, 1)]),
    "cut": ([(600, 1), (3, 1), (700, 1)], [(0, 1), (1, 1), (1000, 1), (513, 1)]),
}


@pytest.mark.parametrize(
    "name", ["llama", "mistral, window", "qwen3", "granite", "olmo2", "mixtral"]
)
@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_captured_is_the_same_whatever_the_plan(
    tmp_path: Path, name: str, pair: str
) -> None:
    """Two captures of one size, by plans with other lengths and other blocks.

    Of a first layer, a middle and a last one: these families' layers are all of a kind.
    """
    config = {**TINY_SIZES, **VARIANTS[name], "max_position_embeddings": 1024}
    config["num_hidden_layers"] = 3
    folder = config_folder(tmp_path, config)
    with noted_launches() as (kernels, launches):
        run = start(folder, gpu_config(1), TINY_BYTES, kernels, TracedGpu)
        (stage,) = run.stages
        assert isinstance(stage.gpu, TracedGpu)
        stage.gpu.launches = launches
        for spans in PAIRS[pair]:
            assert stage.worker._graphs is not None
            stage.worker._graphs._replays.clear()
            run.run_new(spans)
    first, second = stage.gpu.traces
    assert first == second
    code, _, launched = first
    has_experts = load_spec(folder).experts is not None
    num_matmuls = code.count("torch.ops.aten.mm") + code.count("torch.ops.aten.addmm")
    assert num_matmuls == (3 if has_experts else 4) * 3
    for kernel in ("gate_up_tiles", "down_tiles", "sum_choices"):
        assert launched.count(kernel) == (3 if has_experts else 0)
    assert launched.count("attend_tiles") == 3
    assert launched.count("merge_chunks") == (3 if pair == "cut" else 0)


# ---- the same bytes ----------------------------------------------------


def same_bytes(run: ShapeRun, folder: Path) -> None:
    """What `plan` says of each stage, what the engine counts with, and what there is."""
    spec, block_size = load_spec(folder), run.config.block_size
    planned = target(folder, len(run.stages)).memory(layout(run))
    for stage, layers, memory in zip(run.stages, run.settled.layers, planned, strict=True):
        assert stage.loaded.weight_bytes == memory.weights_bytes
        assert stage.loaded_bytes == memory.weights_bytes + rotary_bytes(spec)
        block_bytes = run.settled.layer_block_bytes * len(layers)
        assert block_bytes == block_size * memory.slot_bytes
        assert stage.kv_bytes == run.num_blocks * block_bytes


def target(folder: Path, num_gpus: int, longest: int = 256) -> Target:
    cluster = Cluster(device=GPU, num_nodes=num_gpus, devices_per_node=1)
    return Target(shape=shape_of(load_spec(folder)), cluster=cluster, longest=longest)


def layout(run: ShapeRun) -> Layout:
    return Layout(num_stages=len(run.stages), tensor_parallel=1)


def large(name: str) -> Config:
    """With fewer layers where one expert after the other takes too long: of Qwen3-235B-A22B there
    are 12000."""
    config = LARGE[name]
    return {**config, "num_hidden_layers": 16} if "num_experts" in config else config


def rotary_bytes(spec: ModelSpec) -> int:
    """cos and sin of every position, which are held beside the weights and not counted to them."""
    return 2 * spec.max_model_len * (spec.head_dim // 2) * (4 if spec.rotates_wide else 2)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "smollm3",
        "qwen3, biases and windows",
        "olmo2",
        "gemma2",
        pytest.param("qwen3_moe, dense layers, biases and window", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("num_stages", [1, 5])
def test_a_stage_holds_what_is_planned(
    tmp_path: Path, name: str, num_stages: int, triton: Kernels
) -> None:
    """A stage with both ends holds a tied embedding once, and the others each its own."""
    folder = family(tmp_path, name)
    same_bytes(start(folder, gpu_config(num_stages), TINY_BYTES, triton), folder)


@pytest.mark.parametrize("name", names(LARGE, ["Llama-3.1-70B"]))
def test_what_plan_finds_room_for_has_it(tmp_path: Path, name: str, triton: Kernels) -> None:
    """On the fewest GPUs by plan the engine finds at least as many KV slots, and they are there."""
    folder = config_folder(tmp_path, large(name))
    fewest = target(folder, 1, 4096).fewest_stages(1)
    assert fewest is not None
    run = start(folder, gpu_config(fewest), GPU_BYTES, triton)
    same_bytes(run, folder)
    planned_blocks = target(folder, fewest).cost(layout(run)).kv_tokens() // run.config.block_size
    assert min(planned_blocks, run.settled.max_blocks) <= run.num_blocks
    run.run_new([(100, 1), (0, 20)])
    for stage, activation_bytes in zip(run.stages, run.settled.activation_bytes, strict=True):
        assert stage.activation_bytes <= activation_bytes
        assert stage.loaded_bytes + stage.kv_bytes + activation_bytes <= GPU_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"), [*((name, "triton") for name in LARGE), ("Llama-3.1-70B", "torch")]
)
def test_a_large_model_reads_nothing_but_its_tokens(
    tmp_path: Path, name: str, kernels: str, triton: Kernels
) -> None:
    folder = config_folder(tmp_path, large(name))
    fewest = target(folder, 1, 4096).fewest_stages(1)
    assert fewest is not None
    serve(start(folder, gpu_config(fewest), GPU_BYTES, TORCH if kernels == "torch" else triton))


def test_every_family_has_a_published_size() -> None:
    assert {config["model_type"] for config in LARGE.values()} == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_model_has_the_weights_that_transformers_gives_it(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LARGE[name]))
    shape = shape_of(parse_spec(LARGE[name]))
    held = shape.stage_weights(range(shape.num_layers))
    assert held == sum(weights.numel() for weights in model.parameters())


# ---- activations -------------------------------------------------------

A_PROMPT = [(0, 512)]
A_CHUNK = [(1024, 512)]
DECODES = [(600, 1)] * 32
BOTH = [*DECODES[1:], (0, 481)]


def short_pieces(spec: ModelSpec) -> list[tuple[int, int]]:
    """As many and as long as may be, behind a context that is cut into the most chunks."""
    length = tiles.SHORT * spec.num_kv_heads // spec.num_heads
    longest = min(spec.max_model_len, tiles.CHUNK * tiles.MAX_CHUNKS)
    return [(longest - length, length)] * min(32, 512 // length)


@pytest.mark.parametrize("name", names(LARGE, ["Llama-3.1-70B"]))
def test_a_batch_takes_what_is_set_aside_at_most(
    tmp_path: Path, name: str, triton: Kernels
) -> None:
    """And the largest one takes most of it. Layers come one after the other: two are enough."""
    folder = config_folder(tmp_path, {**LARGE[name], "num_hidden_layers": 2})
    run = start(folder, gpu_config(1), GPU_BYTES, triton)
    (stage,), (set_aside_bytes,) = run.stages, run.settled.activation_bytes
    for spans in (A_PROMPT, A_CHUNK, DECODES, BOTH, short_pieces(load_spec(folder))):
        run.run_new(spans)
        assert stage.activation_bytes <= set_aside_bytes
    assert stage.activation_bytes > set_aside_bytes // 2


def test_contexts_are_cut_as_the_engine_counts() -> None:
    counted = (kv_size.MAX_CUT_ROWS, kv_size.CHUNK, kv_size.MAX_CHUNKS, kv_size.TILE_ROWS)
    assert counted == (tiles.SHORT, tiles.CHUNK, tiles.MAX_CHUNKS, tiles.NARROW)


# ---- the GPU of these tests --------------------------------------------


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(10**9, FakeTensorMode())


READS = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0, 0]),
    "if": lambda x: 1 if (x > 0).any() else 0,
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x[0, 0]),
    "index": lambda x: [1, 2][x.long()[0, 0]],
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to, not waited for": lambda x: x.to("cpu", non_blocking=True),
    "copy_": lambda x: torch.zeros(4, 4).copy_(x),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
}
COPIES = {
    "to": lambda x: torch.zeros(4).to(x.device),
    "to, not pinned": lambda x: torch.zeros(4).to(x.device, non_blocking=True),
    "copy_": lambda x: x.copy_(torch.zeros(4, 4).pin_memory()),
    "a new tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "a list as index": lambda x: x[[0, 1]],
    "a host tensor as index": lambda x: x[torch.tensor([0, 1])],
    "a host tensor as summand": lambda x: x + torch.zeros(4),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_refused(gpu: FakeGpu, name: str) -> None:
    with gpu.running():
        x = torch.empty(4, 4, device=gpu.torch_device)
        with pytest.raises(HostRead):
            READS[name](x)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_waits_is_refused(gpu: FakeGpu, name: str) -> None:
    with gpu.running():
        x = torch.empty(4, 4, device=gpu.torch_device)
        with pytest.raises(HostCopy):
            COPIES[name](x)


def test_uploads_and_downloads_pass(gpu: FakeGpu) -> None:
    with gpu.running():
        upload = Uploads(gpu, num_buffers=2).send([torch.tensor([1, 2, 3]), torch.tensor([4])])
        upload.wait()
        there, other = upload.tables
        assert (there.device, there.shape, there.dtype) == (gpu.torch_device, (3,), torch.int64)
        assert download(gpu, [there + other])[0].tolist() == [0, 0, 0]
        assert torch.tensor([1, 2]).tolist() == [1, 2], "the host's own are real"
    assert (gpu.num_reads, gpu.read_bytes) == (1, 3 * 8)


def test_bytes_come_and_go_with_their_tensors(gpu: FakeGpu) -> None:
    with gpu.running():
        x = torch.empty(100, 10, device=gpu.torch_device)
        halves = x.view(10, 100).split(5)
        y = x + 1
        assert gpu.memory.held_bytes == 8000
        del y
        assert (gpu.memory.held_bytes, gpu.memory.peak_bytes) == (4000, 8000)
        del x
        assert gpu.memory.held_bytes == 4000, "its halves are left"
        del halves
    assert (gpu.memory.held_bytes, gpu.free_bytes) == (0, 10**9)
