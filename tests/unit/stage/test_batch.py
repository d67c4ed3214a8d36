"""From plans to packed batches: what a stage remembers, and the rows it makes of a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orca_dist.device.cpu import CpuDevice
from orca_dist.device.staging import Uploads
from orca_dist.proto.v1.control_pb2 import Admit, Plan, Sampling
from orca_dist.stage.batch import PackedBatch, RequestTable

BLOCK_SIZE = 4
MAX_LEN = 64


@pytest.fixture
def table() -> RequestTable:
    uploads = Uploads(CpuDevice(), num_buffers=2)
    return RequestTable(block_size=BLOCK_SIZE, max_len=MAX_LEN, uploads=uploads, is_last=True)


def admit(
    request_id: int, tokens: Sequence[int], blocks: Sequence[int], *, return_logits: bool = False
) -> Admit:
    sampling = Sampling(seed=request_id, top_p=1.0, return_logits=return_logits)
    return Admit(id=request_id, sampling=sampling, tokens=tokens, blocks=blocks)


def step(
    plan: Plan,
    request_id: int,
    start: int,
    length: int,
    *,
    new_tokens: Sequence[int] = (),
    new_blocks: Sequence[int] = (),
    samples: bool = True,
) -> None:
    """Append one entry to the plan's columns."""
    plan.ids.append(request_id)
    plan.starts.append(start)
    plan.lengths.append(length)
    plan.samples.append(samples)
    plan.num_new_tokens.append(len(new_tokens))
    plan.new_tokens.extend(new_tokens)
    plan.num_new_blocks.append(len(new_blocks))
    plan.new_blocks.extend(new_blocks)


def run(table: RequestTable, plan: Plan) -> PackedBatch:
    table.apply(plan)
    return table.pack(plan)


def two_prompts() -> Plan:
    """Request 7 of 5 tokens in blocks 9 and 2, request 3 of 2 tokens in block 5."""
    plan = Plan(admits=[admit(7, [10, 11, 12, 13, 14], [9, 2]), admit(3, [20, 21], [5])])
    step(plan, 7, 0, 5)
    step(plan, 3, 0, 2)
    return plan


def test_initiations_lie_back_to_back_in_plan_order(table: RequestTable) -> None:
    batch = run(table, two_prompts())
    assert batch.num_rows == 7
    assert batch.token_ids_T.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert (batch.context.starts, batch.context.lengths) == ([0, 0], [5, 2])
    assert len(table) == 2


def test_a_row_writes_the_slot_of_its_position(table: RequestTable) -> None:
    context = run(table, two_prompts()).context
    assert context.slots_T.tolist() == [36, 37, 38, 39, 8, 20, 21]
    assert [blocks.tolist() for blocks in context.blocks] == [[9, 2], [5]]


def test_increments_use_the_tokens_that_steps_bring(table: RequestTable) -> None:
    run(table, two_prompts())
    plan = Plan(admits=[admit(8, [30, 31, 32], [0])])
    step(plan, 3, 2, 1, new_tokens=[22])
    step(plan, 8, 0, 3)
    step(plan, 7, 5, 1, new_tokens=[15])
    batch = run(table, plan)
    assert batch.token_ids_T.tolist() == [22, 30, 31, 32, 15]
    assert batch.positions_T.tolist() == [2, 0, 1, 2, 5]
    assert batch.context.slots_T.tolist() == [22, 0, 1, 2, 9]
    assert (batch.context.starts, batch.context.lengths) == ([2, 0, 5], [1, 3, 1])


def test_a_step_may_bring_several_tokens(table: RequestTable) -> None:
    run(table, two_prompts())
    plan = Plan()
    step(plan, 7, 5, 2, new_tokens=[15, 16])
    step(plan, 3, 2, 1, new_tokens=[22])
    assert run(table, plan).token_ids_T.tolist() == [15, 16, 22]


def test_new_blocks_hold_the_positions_that_follow(table: RequestTable) -> None:
    """Request 3 fills its block and goes on in block 11; request 7 gets two more."""
    run(table, two_prompts())
    plan = Plan()
    step(plan, 3, 2, 3, new_tokens=[22, 23, 24], new_blocks=[11])
    step(plan, 7, 5, 1, new_tokens=[15], new_blocks=[1, 6])
    batch = run(table, plan)
    assert batch.context.slots_T.tolist() == [22, 23, 44, 9]
    assert [blocks.tolist() for blocks in batch.context.blocks] == [[5, 11], [9, 2, 1, 6]]


def test_chunks_of_a_known_prompt_need_no_new_tokens(table: RequestTable) -> None:
    plan = Plan(admits=[admit(1, [10, 11, 12, 13, 14], [9, 2])])
    step(plan, 1, 0, 3, samples=False)
    batch = run(table, plan)
    assert batch.token_ids_T.tolist() == [10, 11, 12]
    assert batch.sampled == []
    rest = Plan()
    step(rest, 1, 3, 2)
    batch = run(table, rest)
    assert batch.token_ids_T.tolist() == [13, 14]
    assert batch.positions_T.tolist() == [3, 4]
    assert batch.context.slots_T.tolist() == [39, 8]
    assert (batch.sampled[0].rows, batch.sampled[0].position) == (range(1, 2), 5)


def test_a_dropped_request_is_forgotten(table: RequestTable) -> None:
    run(table, two_prompts())
    table.apply(Plan(drops=[7]))
    assert len(table) == 1
    stale = Plan()
    step(stale, 7, 5, 1, new_tokens=[15])
    with pytest.raises(KeyError):
        table.apply(stale)


def test_a_drop_of_a_stranger_is_an_error(table: RequestTable) -> None:
    with pytest.raises(KeyError):
        table.apply(Plan(drops=[99]))


def test_drop_and_admit_of_an_id_in_one_plan_start_it_afresh(table: RequestTable) -> None:
    """As after a preemption: the tokens so far are its new prompt, in other blocks."""
    run(table, two_prompts())
    plan = Plan(drops=[7], admits=[admit(7, [10, 11, 12, 13, 14, 15], [4, 6])])
    step(plan, 7, 0, 6)
    batch = run(table, plan)
    assert batch.token_ids_T.tolist() == [10, 11, 12, 13, 14, 15]
    assert batch.context.slots_T.tolist() == [16, 17, 18, 19, 24, 25]
    assert len(table) == 2


def test_blocks_of_a_dropped_request_serve_the_next_one_at_once(table: RequestTable) -> None:
    run(table, two_prompts())
    plan = Plan(drops=[3], admits=[admit(4, [40], [5])])
    step(plan, 4, 0, 1)
    assert run(table, plan).context.slots_T.tolist() == [20]


def test_a_batch_keeps_what_it_was_packed_with(table: RequestTable) -> None:
    """Later plans don't reach into batches that are still on their way."""
    batch = run(table, two_prompts())
    plan = Plan(drops=[3])
    step(plan, 7, 5, 1, new_tokens=[15], new_blocks=[1])
    run(table, plan)
    assert batch.token_ids_T.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert [blocks.tolist() for blocks in batch.context.blocks] == [[9, 2], [5]]


def test_only_the_last_row_of_an_entry_samples(table: RequestTable) -> None:
    plan = two_prompts()
    plan.admits.append(admit(8, [30], [0]))
    step(plan, 8, 0, 1)
    sampled = run(table, plan).sampled
    assert [entry.id for entry in sampled] == [7, 3, 8]
    assert [entry.rows for entry in sampled] == [range(4, 5), range(6, 7), range(7, 8)]
    assert [entry.position for entry in sampled] == [5, 2, 1]
    assert [entry.sampling.seed for entry in sampled] == [7, 3, 8]


def test_return_logits_takes_all_rows_of_the_entry(table: RequestTable) -> None:
    plan = Plan(
        admits=[
            admit(1, [10, 11], [0]),
            admit(2, [20, 21, 22], [1], return_logits=True),
            admit(3, [30, 31], [2], return_logits=True),
        ]
    )
    step(plan, 1, 0, 2)
    step(plan, 2, 0, 3)
    step(plan, 3, 0, 1, samples=False)
    sampled = run(table, plan).sampled
    assert [(entry.id, entry.rows, entry.samples) for entry in sampled] == [
        (1, range(1, 2), True),
        (2, range(2, 5), True),
        (3, range(5, 6), False),
    ]


def test_only_the_last_stage_says_how_to_sample() -> None:
    for is_last in (True, False):
        uploads = Uploads(CpuDevice(), num_buffers=2)
        table = RequestTable(
            block_size=BLOCK_SIZE, max_len=MAX_LEN, uploads=uploads, is_last=is_last
        )
        batch = run(table, two_prompts())
        assert len(batch.sampled) == 2
        assert len(batch.parameters_EP) == (2 if is_last else 0)


def test_columns_of_different_lengths_are_an_error(table: RequestTable) -> None:
    plan = two_prompts()
    plan.num_new_tokens.append(1)
    with pytest.raises(ValueError, match="zip"):
        table.apply(plan)
