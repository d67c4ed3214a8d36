"""It is a pipeline: stages overlap, about one batch a stage is in flight, little travels.

Four local stages, each 20 ms slower than it need be, so that overlap shows
whatever the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_dist.metrics.trace import PlanTrace, in_flight
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import Front, live, local_config, slow_placement
from tests.fixtures.slow_stage import DELAY_S

STAGES = 4
HIDDEN, ITEMSIZE = 64, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loud")
    loud_llama(folder)
    return folder


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    with live(folder, local_config(STAGES), placement=slow_placement()) as front:
        yield front


@pytest.fixture(scope="module")
def plans(front: Front) -> list[PlanTrace]:
    """Eight equal requests of ten tokens: two a batch, 40 iterations."""
    front.generate([[i, i + 1, i + 2] for i in range(8)], max_tokens=10)
    return front.trace()


def test_stages_overlap(plans: list[PlanTrace]) -> None:
    assert len(plans) >= 40
    wall_s = max(plan.returned_s or 0 for plan in plans) - plans[0].sent_s
    serial_s = len(plans) * STAGES * DELAY_S
    assert wall_s < 0.5 * serial_s


def test_four_batches_in_flight(plans: list[PlanTrace]) -> None:
    counts = [count for _, count in in_flight(plans)]
    assert max(counts) == STAGES
    steady = counts[STAGES : len(counts) - 2 * STAGES]
    assert sum(count >= STAGES - 1 for count in steady) >= 0.9 * len(steady)


def test_balanced_batches(plans: list[PlanTrace]) -> None:
    """Eight requests over four places: two a batch, once the first round trip is over."""
    assert {len(plan.ids) for plan in plans[2 * STAGES : -STAGES]} == {2}


def test_link_carries_activations_only(plans: list[PlanTrace]) -> None:
    for plan in plans:
        rows = sum(plan.lengths)
        sent = [plan.spans[stage].bytes_sent for stage in range(STAGES)]
        assert sent == [rows * HIDDEN * ITEMSIZE] * (STAGES - 1) + [0]


def test_same_plans_in_order_on_every_stage(plans: list[PlanTrace]) -> None:
    for stage in range(STAGES):
        starts = [plan.spans[stage].compute_start_s for plan in plans]
        assert starts == sorted(starts)


def test_control_bytes_do_not_grow(front: Front, tmp_path: Path) -> None:
    """A decode iteration costs the same bytes at any context, on a wider model too.

    One that brings a block of memory costs its number more: a tag, a length and a varint.
    """
    steady, with_block = _decode_bytes(front)
    (size,) = steady
    assert size < min(with_block) <= max(with_block) <= size + 2 + 2
    loud_llama(tmp_path / "wide", hidden_size=256)
    with live(tmp_path / "wide", local_config(1)) as wide:
        wide.generate([[1]], max_tokens=1)  # as many ids and plans before as there
        assert _decode_bytes(wide)[0] == steady


def _decode_bytes(front: Front) -> tuple[set[int], set[int]]:
    """Sizes of a lone request's decode plans, first without and then with a new block.

    Plan numbers, ids and tokens are varints, whose bytes differ: they are taken out.
    """
    prompt = [5, 6, 7]
    front.generate([prompt], max_tokens=40)
    tokens = front.answers[max(front.answers)].tokens
    steady, with_block = set(), set()
    columns = zip(front.trace()[-39:], tokens, strict=False)
    for position, (plan, token) in enumerate(columns, len(prompt)):
        size = plan.control_bytes - sum(map(_varint_len, (plan.seq, token, plan.ids[0])))
        (steady if position % front.engine.config.block_size else with_block).add(size)
    return steady, with_block


def _varint_len(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


def test_one_request_alone_finishes_on_four_stages(front: Front) -> None:
    before = len(front.trace())
    (answer,) = front.generate([[9, 8, 7]], max_tokens=5)
    plans = front.trace()[before:]
    assert len(answer.tokens) == 5
    assert len(plans) == 5
    assert max(count for _, count in in_flight(plans)) == 1
