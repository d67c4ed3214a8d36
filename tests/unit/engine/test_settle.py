"""Where every `auto` ends, and what is refused with its numbers."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from orca_dist.config import DeviceKind, Dtype, EngineConfig, Launcher, LogConfig, Split
from orca_dist.engine import settle as module
from orca_dist.engine.kv_size import FLASHINFER_BYTES, activation_bytes
from orca_dist.engine.settle import (
    cpus_per_stage,
    settle,
    settle_device,
    settle_dtype,
    settle_max_model_len,
)
from orca_dist.engine.stages import PipelineConfig
from orca_dist.errors import ConfigError
from orca_dist.spec import Experts, ModelSpec, parse_spec

# Keys and values of one token in fp32: 2 x 10 layers x 2 heads x 16 x 4 bytes.
KV_BYTES = 2560


def make_spec(dtype: str = "float32") -> ModelSpec:
    return parse_spec(
        {
            "model_type": "llama",
            "num_hidden_layers": 10,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
            "max_position_embeddings": 1000,
            "dtype": dtype,
        }
    )


def make_config(**changes: object) -> EngineConfig:
    settings: dict[str, object] = {"device": "cpu", "dtype": "float32"}
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


def settled(**changes: object) -> PipelineConfig:
    return settle("/models/m", make_spec(), make_config(**changes), LogConfig())


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve CPUs for this process, however many the machine has."""
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(12)))


# ---- ids ---------------------------------------------------------------


@pytest.mark.parametrize(("known", "sampled"), [(None, 320), (315, 315), (320, 320), (400, 320)])
def test_ids_without_a_text_are_left_out(known: int | None, sampled: int) -> None:
    settled = settle("/models/m", make_spec(), make_config(), LogConfig(), num_token_ids=known)
    assert settled.num_token_ids == sampled


# ---- device, dtype, link -----------------------------------------------


@pytest.mark.parametrize(("driver", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_device_follows_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: bool, device: str
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: driver and str(path) == "/dev/nvidiactl")
    assert settle_device(DeviceKind.AUTO) == device
    assert settle_device(DeviceKind.CPU) == "cpu"
    assert settle_device(DeviceKind.CUDA) == "cuda"


@pytest.mark.parametrize(
    ("own", "device", "fast_bf16", "settled_dtype"),
    [
        ("float32", "cpu", True, "float32"),
        ("bfloat16", "cpu", True, "bfloat16"),
        ("bfloat16", "cpu", False, "float32"),
        ("float16", "cpu", True, "float32"),
        ("float32", "cuda", False, "float32"),
        ("bfloat16", "cuda", False, "bfloat16"),
        ("float16", "cuda", False, "float16"),
        ("float64", "cuda", False, "float32"),
        ("auto", "cuda", False, "float32"),
    ],
)
def test_auto_dtype(
    monkeypatch: pytest.MonkeyPatch, own: str, device: str, fast_bf16: bool, settled_dtype: str
) -> None:
    monkeypatch.setattr(module, "_cpu_has_fast_bf16", lambda: fast_bf16)
    assert settle_dtype(Dtype.AUTO, make_spec(own), DeviceKind(device)) == settled_dtype


@pytest.mark.parametrize("wanted", [dtype for dtype in Dtype if dtype != "auto"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dtype_that_is_asked_for_is_taken(wanted: Dtype, device: str) -> None:
    assert settle_dtype(wanted, make_spec("bfloat16"), DeviceKind(device)) is wanted


@pytest.mark.parametrize(
    ("device", "launcher", "link"),
    [
        ("cpu", "ray", "gloo"),
        ("cpu", "local", "gloo"),
        ("cuda", "ray", "nccl"),
        ("cuda", "local", "host"),
    ],
)
def test_links(device: str, launcher: str, link: str) -> None:
    config = settled(device=device, launcher=launcher)
    assert (config.link, config.device) == (link, device)


# ---- shape -------------------------------------------------------------


def test_auto_is_even_where_the_head_is_small(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert settled(stages=3) == settled(stages=3, split=("even",)) == settled(stages=3, split=())
    assert "split 4 3 3: even, since the output head counts as 0.1 layers" in caplog.text
    assert "split 4 3 3: as asked" in caplog.text


def test_auto_leaves_the_last_stage_room_for_the_head(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    spec = replace(make_spec(), vocab_size=32_000)
    sizes = [len(each) for each in settle("/m", spec, make_config(), LogConfig()).layers]
    assert sum(sizes) == 10
    assert sizes[0] > sizes[1]
    assert re.search(r"split \d \d: the output head counts as \d+\.\d layers", caplog.text)
    even = settle("/m", spec, make_config(split=(Split.EVEN,)), LogConfig())
    assert [len(each) for each in even.layers] == [5, 5]


def test_layers_are_split_over_the_stages() -> None:
    assert settled(stages=3).layers == (range(4), range(4, 7), range(7, 10))
    assert settled(stages=2, split=(3, 7)).layers == (range(3), range(3, 10))
    assert settled(stages=3).num_stages == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 11}, "stages = 11: a model of 10 layers takes 1 to 10 stages"),
        ({"stages": 2, "split": (5, 6)}, "adds up to 11 layers, the model has 10"),
        ({"stages": 2, "split": (10,)}, "1 sizes for 2 stages"),
        ({"stages": 0}, "stages = 0"),
        ({"split": ("even", 3)}, "split = even 3: give auto, even, or a number of layers"),
        ({"split": ("half",)}, "split = half: give auto, even, or a number of layers"),
        ({"max_batch_size": 0}, "max_batch_size = 0"),
        ({"inflight": 0}, "inflight = 0"),
        ({"kv_tokens": -5}, "kv_tokens = -5"),
        ({"memory_share": 1.5}, "memory_share = 1.5"),
        ({"heartbeat_s": 0.0}, "heartbeat_s = 0.0"),
        ({"cpus_per_stage": 0.0}, "cpus_per_stage = 0.0"),
    ],
)
def test_what_cannot_be_had_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(**changes)
    assert message in str(caught.value)


def test_one_plan_a_stage_is_in_flight_by_default() -> None:
    assert settled(stages=3).inflight == 3
    assert settled(stages=3, inflight=4).inflight == 4


def test_max_model_len() -> None:
    assert settle_max_model_len(make_spec(), make_config()) == 1000
    assert settle_max_model_len(make_spec(), make_config(max_model_len=300)) == 300
    with pytest.raises(ConfigError, match=r"max_model_len = 1001: .* at most 1000"):
        settle_max_model_len(make_spec(), make_config(max_model_len=1001))


# ---- threads -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_cpus", "num_threads"),
    [
        ({"stages": 3}, 4.0, 4),
        ({"stages": 5}, 2.4, 2),
        ({"stages": 2, "cpus_per_stage": 0.5}, 0.5, 1),
        ({"stages": 2, "cpus_per_stage": 3.9}, 3.9, 3),
        ({"stages": 2, "ray_address": "10.0.0.1:6379"}, 1.0, 1),
        ({"stages": 2, "ray_address": "auto", "cpus_per_stage": 8}, 8, 8),
    ],
)
def test_cpus_of_a_stage(
    cpus: None, changes: dict[str, object], num_cpus: float, num_threads: int
) -> None:
    assert cpus_per_stage(make_config(**changes)) == pytest.approx(num_cpus)
    assert settled(**changes).num_threads == num_threads


def test_more_stages_than_cpus_have_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0})
    assert settled(stages=4).num_threads == 1


# ---- KV ----------------------------------------------------------------


def test_kv_tokens_are_rounded_up_to_blocks() -> None:
    assert settled(kv_tokens=4096).num_blocks == 256
    assert settled(kv_tokens=4097).num_blocks == 257
    assert settled(kv_tokens=2).num_blocks == 1
    assert settled(kv_tokens=4096, block_size=1).num_blocks == 4096


def test_without_a_wish_the_stages_decide() -> None:
    assert settled().num_blocks is None
    assert settled().memory_share == 0.25
    assert settled(device="cuda").memory_share == 0.9
    assert settled(memory_share=0.5).memory_share == 0.5


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_a_block_is_counted_by_hand(dtype: str, itemsize: int) -> None:
    assert settled(dtype=dtype).layer_block_bytes == 16 * KV_BYTES * itemsize // 4 // 10


def test_kv_takes_no_more_than_the_batches_in_flight_can_use() -> None:
    """63 blocks hold 1000 tokens; 2 x 3 requests run at most."""
    assert settled(max_batch_size=2, inflight=3).max_blocks == 63 * 2 * 3
    assert settled(max_batch_size=2, inflight=3, max_model_len=32).max_blocks == 2 * 2 * 3


def test_activations_are_counted_for_the_longest_batch() -> None:
    """Widths of 64 hidden, 64 + 32 + 32 heads and 96 inner; the head is the last stage's."""
    widths = 4 * 64 + 3 * 64 + 4 * 32 + 3 * 96
    head = 32 * 320 * (4 + 4)
    tapes = tape_bytes_of(itemsize=4)
    assert settled(max_batch_tokens=100).activation_bytes == (
        100 * widths * 4 + tapes,
        100 * widths * 4 + head + tapes,
    )
    whole = settled(max_batch_tokens=100, chunked_prefill="off", dtype="bfloat16")
    assert whole.activation_bytes[0] == 1000 * widths * 2 + tape_bytes_of(itemsize=2)


def tape_bytes_of(*, itemsize: int) -> int:
    """Of each stage: layers over 1, 2, 4 and 8 rows; 8 inputs, each with its position, slot, row of
    attention's table and 63 blocks; a block of KV in 5 layers."""
    widths = 6 * 64 + 3 * 64 + 2 * 32 + 3 * 96
    block = settled(dtype={2: "bfloat16", 4: "float32"}[itemsize]).layer_block_bytes
    return 15 * 5 * widths * itemsize + 8 * (64 * itemsize + 8 * (2 + 4 + 63)) + 5 * block


def test_experts_take_the_place_of_the_mlp() -> None:
    """For each of two that a row goes through three of 10 and three of 64, and two sums in fp32."""
    counted = {"rows": 100, "sampled_rows": 1, "itemsize": 2, "has_head": False}
    experts = Experts(
        num_experts=5,
        num_chosen=2,
        intermediate_size=10,
        normalised=True,
        rounds_shares=False,
        layers=tuple(range(make_spec().num_layers)),
    )
    plain = activation_bytes(make_spec(), **counted)
    mixed = activation_bytes(replace(make_spec(), experts=experts), **counted)
    assert mixed - plain == 100 * (2 * 3 * (10 + 64) * 2 + 2 * 64 * 4 - 3 * 96 * 2)


def test_cut_contexts_take_the_place_of_the_mlp_where_they_are_larger() -> None:
    """16 values, a peak and a total in fp32 for each of 4 heads and 32 chunks; a request has 64
    rows at most that are cut, for its 2 query heads of a KV head."""
    counted = {"rows": 100, "itemsize": 4, "has_head": False}
    rest = 100 * (4 * 64 + 3 * 64 + 4 * 32) * 4
    for num_requests, rows in ((1, 64), (2, 100)):
        cut = activation_bytes(make_spec(), sampled_rows=num_requests, cut_len=40_000, **counted)
        assert cut == rest + rows * 32 * 4 * 18 * 4
    short = activation_bytes(make_spec(), sampled_rows=2, cut_len=1000, **counted)
    assert short == rest + 100 * 3 * 96 * 4, "two chunks take less than the MLP"


def test_contexts_are_cut_on_gpus_alone() -> None:
    changes = {
        "max_batch_tokens": 100,
        "max_model_len": 1000,
        "dtype": "bfloat16",
    }
    on = {device: settled(device=device, **changes).activation_bytes for device in ("cpu", "cuda")}
    rest = 100 * (4 * 64 + 3 * 64 + 4 * 32) * 2
    assert on["cpu"][0] == rest + 100 * 3 * 96 * 2 + tape_bytes_of(itemsize=2)
    assert on["cuda"][0] == rest + 100 * 2 * 4 * 18 * 4


def test_graphs_are_counted_with_the_activations() -> None:
    """For 8 rows: what their layers compute, with 32 chunks of 4 heads of 16 values, a peak and a
    total; an input, positions, slots, 63 blocks, 32 programs and a merge of each; a block of KV in
    5 layers."""
    changes = {"device": "cuda", "dtype": "bfloat16", "max_batch_size": 8}
    (on, _), (off, _) = (
        settled(cuda_graphs=switch, **changes).activation_bytes for switch in ("on", "off")
    )
    computed = 8 * ((4 * 64 + 3 * 64 + 4 * 32) * 2 + 32 * 4 * 18 * 4)
    static = 8 * (64 * 2 + 8 * (2 + 63) + 32 * 32 + 20)
    assert on - off == computed + static + 5 * settled(**changes).layer_block_bytes


def test_graphs_are_for_batches_that_are_not_large() -> None:
    for max_batch_size, rows in ((5, 5), (1000, 8)):
        assert settled(device="cpu", max_batch_size=max_batch_size).graph_rows == rows
    assert settled(device="cuda", cuda_graphs="off").graph_rows == 0
    for max_batch_size, rows in ((30, 30), (1000, 256)):
        changes = {"device": "cuda", "cuda_graphs": "on", "max_batch_size": max_batch_size}
        assert settled(**changes).graph_rows == rows


def test_flash_infer_is_for_gpus_and_its_workspace_is_counted() -> None:
    with pytest.raises(ConfigError, match=r"^attention_backend = flashinfer: .*--device cuda"):
        settled(attention_backend="flashinfer")
    ours, theirs = (
        settled(device="cuda", attention_backend=word) for word in ("triton", "flashinfer")
    )
    assert (ours.attention_backend, theirs.attention_backend) == ("triton", "flashinfer")
    pairs = zip(ours.activation_bytes, theirs.activation_bytes, strict=True)
    assert {more - less for less, more in pairs} == {FLASHINFER_BYTES}


def test_the_launcher_is_no_part_of_the_rest() -> None:
    ray, local = (settled(launcher=launcher, kv_tokens=64) for launcher in Launcher)
    assert ray == local


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_more_cpu_stages_than_cores_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    settled(device="cpu", stages=2)
    assert warnings(caplog) == []
    settled(device="cpu", stages=3)
    assert warnings(caplog) == ["3 stages share 2 cores: they wait for each other"]
