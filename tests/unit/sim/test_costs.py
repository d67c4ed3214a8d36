"""Costs of an iteration: formulae by hand, and tables from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orca_dist.core import Plan
from orca_dist.errors import ConfigError
from orca_dist.sim import paper
from orca_dist.sim.batch import BatchShape, batch_shape
from orca_dist.sim.hardware import DEVICES, find_device
from orca_dist.sim.roofline import Placement, RooflineCost
from orca_dist.sim.shapes import ModelShape, gpt_shape
from orca_dist.sim.table import read_cost_table
from orca_dist.spec import Experts

LAYER = 12 * 256 * 256  # weights of a GPT-style layer
VOCAB = 50257


def plan_of(*entries: tuple[int, int, bool]) -> Plan:
    """Entries (start, length, samples)."""
    plan = Plan(seq=0)
    for request_id, (start, length, samples) in enumerate(entries):
        plan.add(request_id, start, length, samples)
    return plan


def cost(tensor_parallel: int = 1, efficiency: float = 1.0, itemsize: int = 2) -> RooflineCost:
    placement = Placement(
        split=(2, 3),
        device=find_device("A100-40GB"),
        tensor_parallel=tensor_parallel,
        efficiency=efficiency,
        itemsize=itemsize,
        link_bytes_s=1e9,
    )
    return RooflineCost(gpt_shape(5, 256), placement)


def test_a_batch_in_numbers() -> None:
    assert batch_shape(plan_of((10, 1, True), (4, 1, True))) == (2, 2, 16, 16)
    chunk = batch_shape(plan_of((10, 3, False), (4, 1, True)))
    assert chunk == (4, 1, 13 + 5, (11 + 12 + 13) + 5)


def test_a_small_batch_is_bound_by_memory_and_a_large_one_by_arithmetic() -> None:
    small, large = BatchShape(1, 1, 1, 1), BatchShape(4096, 0, 1, 1)
    assert cost().stage_time(small, 0).matmul_s == pytest.approx(2 * LAYER * 2 / 1555e9)
    assert cost().stage_time(large, 0).matmul_s == pytest.approx(2 * 2 * LAYER * 4096 / 312e12)


def test_attention_reads_each_requests_keys_and_values_once() -> None:
    decode, prompt = BatchShape(8, 8, 8000, 8000), BatchShape(4096, 0, 4096, 4096 * 4097 / 2)
    assert cost().stage_time(decode, 1).attention_s == pytest.approx(
        3 * 2 * 256 * 2 * 8000 / 1555e9
    )
    assert cost().stage_time(prompt, 1).attention_s == pytest.approx(
        3 * 4 * 256 * prompt.attended / 312e12
    )


def test_the_ends_of_the_pipeline_have_more_to_do() -> None:
    batch = BatchShape(8, 4, 80, 80)
    first, last = (cost().stage_time(batch, stage) for stage in (0, 1))
    assert first.embedding_s == pytest.approx(8 * 256 * 2 / 1555e9)
    assert first.head_s == last.embedding_s == 0
    assert last.head_s == pytest.approx(256 * VOCAB * 2 / 1555e9)
    assert cost().stage_time(batch._replace(num_sampled=0), 1).head_s == 0


def test_shards_divide_the_work_and_add_all_reduces() -> None:
    batch = BatchShape(64, 64, 6400, 6400)
    alone, shared = cost().stage_time(batch, 0), cost(tensor_parallel=4).stage_time(batch, 0)
    assert alone.allreduce_s == 0
    assert shared.matmul_s == pytest.approx(alone.matmul_s / 4)
    assert shared.attention_s == pytest.approx(alone.attention_s / 4)
    assert shared.allreduce_s == pytest.approx(2 * 2 * 2 * (3 / 4) * 64 * 256 * 2 / 300e9)


def test_efficiency_scales_all_but_launches() -> None:
    batch = BatchShape(64, 64, 6400, 6400)
    full, half = (cost(2, efficiency).stage_time(batch, 1) for efficiency in (1.0, 0.5))
    assert half.launch_s == full.launch_s == pytest.approx(3 * 12 * 0.9e-6)
    assert half.total_s - half.launch_s == pytest.approx(2 * (full.total_s - full.launch_s))


def test_a_plans_times_are_the_sums_of_the_parts() -> None:
    plan = plan_of((0, 100, True), (50, 1, True))
    model = cost(tensor_parallel=2)
    times = model.times(plan)
    wanted = [model.stage_time(batch_shape(plan), stage).total_s for stage in (0, 1)]
    assert times.stage_s == pytest.approx(wanted)
    assert times.link_s == pytest.approx(101 * 256 * 2 / 1e9)


def test_a_gated_model_with_few_kv_heads() -> None:
    shape = ModelShape(
        num_layers=1,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=10,
        gated=True,
    )
    assert shape.layer_weights == 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    assert shape.kv_elements == 2 * 3 * 64


# A layer's matrices take 720, its vectors 5; embedding and head 40 each, the final norm 3.
HELD = ModelShape(
    num_layers=4,
    hidden_size=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=5,
    intermediate_size=14,
    vocab_size=4,
    gated=True,
    layer_vectors=5,
    final_vectors=3,
)


def test_a_stage_holds_its_layers_and_the_pipelines_ends() -> None:
    assert HELD.stage_weights(range(1, 3)) == 2 * 725
    assert HELD.stage_weights(range(2)) == 2 * 725 + 40
    assert HELD.stage_weights(range(2, 4)) == 2 * 725 + 40 + 3
    assert HELD.stage_weights(range(4)) == 4 * 725 + 80 + 3


def test_a_tied_embedding_is_held_once_where_a_stage_has_both_ends() -> None:
    tied = replace(HELD, is_tied=True)
    assert tied.stage_weights(range(4)) == 4 * 725 + 40 + 3
    ends = [tied.stage_weights(layers) for layers in (range(2), range(2, 4))]
    assert sum(ends) == 4 * 725 + 80 + 3


# In layers 1 and 3 a router of 10 x 6 and six experts of 3 x 10 x 8 in place of the MLP's 420.
MIXED = replace(
    HELD,
    experts=Experts(
        num_experts=6,
        num_chosen=2,
        intermediate_size=8,
        normalised=True,
        rounds_shares=False,
        layers=(1, 3),
    ),
)
ATTENTION, EXPERT = 300, 240


def mixed_cost(*split: int, flop_s: float) -> RooflineCost:
    device = replace(find_device("L4"), flop_s=flop_s, memory_bytes_s=1e6)
    return RooflineCost(MIXED, Placement(split=split, device=device, link_bytes_s=1e9))


def test_all_experts_are_held() -> None:
    mixture = ATTENTION + 60 + 6 * EXPERT + 5
    assert MIXED.stage_weights(range(1)) == 725 + 40
    assert MIXED.stage_weights(range(1, 2)) == mixture
    assert MIXED.stage_weights(range(4)) == 2 * 725 + 2 * mixture + 80 + 3
    held = [mixed_cost(3, 1, flop_s=1e6).stage_memory(stage).weights_bytes for stage in (0, 1)]
    assert held == [2 * (2 * 725 + mixture + 40), 2 * (mixture + 40 + 3)]


def test_a_token_is_computed_by_those_it_chose_and_a_batch_reads_what_some_token_chose() -> None:
    """Of six each token chooses two: n leave an expert out by (2/3)^n."""
    assert [MIXED.experts_read(rows) for rows in (0, 1, 2)] == pytest.approx([0, 2, 10 / 3])
    assert MIXED.experts_read(1000) == pytest.approx(6)
    read, computed = ATTENTION + 60 + 10 / 3 * EXPERT, ATTENTION + 60 + 2 * EXPERT
    few, many = BatchShape(2, 0, 0, 0), BatchShape(1000, 0, 0, 0)
    assert mixed_cost(4, flop_s=1e12).stage_time(few, 0).matmul_s == pytest.approx(
        2 * (720 + read) * 2 / 1e6
    )
    assert mixed_cost(4, flop_s=1e6).stage_time(many, 0).matmul_s == pytest.approx(
        2 * (720 + computed) * 2 * 1000 / 1e6
    )


def test_stages_take_as_long_as_their_own_layers() -> None:
    plan = plan_of((0, 100, True), (50, 1, True))
    model = mixed_cost(2, 1, 1, flop_s=1e6)
    wanted = [model.stage_time(batch_shape(plan), stage).total_s for stage in range(3)]
    assert model.times(plan).stage_s == pytest.approx(wanted)
    assert len({round(each, 9) for each in wanted}) == 3


def test_room_for_kv_is_what_the_fullest_stage_leaves() -> None:
    weights = (3 * LAYER + 256 * VOCAB) * 2
    assert cost().kv_tokens() == int((0.9 * 40e9 - weights) / (3 * 2 * 256 * 2))


def test_a_model_that_does_not_fit_is_refused() -> None:
    placement = Placement(split=(96,), device=find_device("L4"), link_bytes_s=1e9)
    with pytest.raises(ConfigError, match=r"stage 0: its weights take 3\d\d\.\d GB, 90% of 1 x L4"):
        RooflineCost(gpt_shape(96, 12288), placement).kv_tokens()


def test_devices_are_found_whatever_the_case() -> None:
    assert find_device("h200") is DEVICES["H200"]
    with pytest.raises(ConfigError, match=r"gpu = A100: not known; did you mean .*A100-40GB"):
        find_device("A100")
    with pytest.raises(ConfigError, match="gpu = zzz: not known; choose one of A100-40GB"):
        find_device("zzz")


def test_the_efficiency_follows_from_its_anchor() -> None:
    assert round(paper.anchored_efficiency(), 2) == paper.EFFICIENCY


# ---- tables ------------------------------------------------------------

STAGE = {"layers": 2, "tokens": [[1, 0.01], [101, 0.11], [201, 0.41]]}
TABLE = {
    "schema": 1,
    "model": "m",
    "device": "d",
    "stages": [
        STAGE,
        STAGE | {"sampled": [[0, 0], [10, 0.1]], "attended": [[0, 0], [1000, 1.0]]},
    ],
    "link": [[1, 0.001]],
    "plan_latency_s": 0.002,
    "kv_tokens": 5000,
}


def write(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(document))
    return path


def test_a_table_is_a_sum_of_piecewise_linear_parts(tmp_path: Path) -> None:
    table = read_cost_table(write(tmp_path, TABLE))
    times = table.times(plan_of((9, 1, True), (19, 50, True)))
    assert times.link_s == 0.001
    attended = 10 + sum(range(20, 70))
    assert times.stage_s == pytest.approx([0.06, 0.06 + 0.02 + attended / 1000])
    assert table.times(plan_of((0, 301, False))).stage_s[0] == pytest.approx(0.71)  # beyond
    assert table.latency.plan_s == 0.002
    assert table.latency.token_s == 0
    assert table.kv_tokens == 5000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema = 2: needs 1"),
        ({"stages": []}, "stages: needs a list"),
        ({"stages": [1]}, r"stages\[0\]: needs an object"),
        ({"stages": [{"tokens": [[1, 0]]}]}, r"stages\[0\]: tokens: one token takes no time"),
        ({"stages": [{"layers": 1}]}, r"stages\[0\]: tokens = None"),
        ({"stages": [{"tokens": [[2, 1], [1, 2]]}]}, "x has to rise"),
        ({"stages": [{"tokens": [[1, -1]]}]}, r"tokens\[0\] = -1: needs 0 or more"),
        ({"stages": [{"tokens": [[1]]}]}, r"tokens\[0\] = \[1\]: needs \[x, seconds\]"),
        ({"stages": [{"tokns": [[1, 1]]}]}, "tokns: no such name"),
        ({"links": []}, "links: no such name"),
        ({"kv_tokens": 1.5}, "kv_tokens = 1.5"),
        ({"token_latency_s": "x"}, "token_latency_s = 'x'"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cost_table(write(tmp_path, TABLE | change))


def test_a_table_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read as a cost table"):
        read_cost_table(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="needs a JSON object"):
        read_cost_table(write(tmp_path, [1]))
