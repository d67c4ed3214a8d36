"""The picture of the pipeline, exactly, and the numbers of its summary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from orca_dist.metrics.pipeline_view import letter, pipeline_view
from orca_dist.metrics.summary import RequestRow, amount, request_table, totals
from orca_dist.metrics.trace import PlanTrace, StageSpan, in_flight, summarize

Times = tuple[float, float]  # a block's start and end, ms


def span(start_ms: float, end_ms: float, bytes_sent: int = 0) -> StageSpan:
    start_s, end_s = start_ms / 1e3, end_ms / 1e3
    return StageSpan(
        received_s=start_s,
        input_ready_s=start_s,
        compute_start_s=start_s,
        compute_end_s=end_s,
        sent_s=end_s,
        bytes_sent=bytes_sent,
    )


def plan(
    seq: int, sent_ms: float, ids: Sequence[int], length: int, stages: Sequence[Times]
) -> PlanTrace:
    """Returns when the last stage is done; all stages but the last send 100 bytes."""
    last = len(stages) - 1
    return PlanTrace(
        seq=seq,
        ids=tuple(ids),
        lengths=(length,) * len(ids),
        sent_s=sent_ms / 1e3,
        control_bytes=50,
        returned_s=stages[-1][1] / 1e3,
        spans={i: span(*times, 100 if i < last else 0) for i, times in enumerate(stages)},
    )


# Two batches in turn: prompts of 20 tokens for 15 ms a stage, then 5 ms a token.
RUN = [
    plan(1, 0, [7, 8], 20, [(0, 15), (15, 30)]),
    plan(2, 0, [9], 20, [(15, 30), (30, 45)]),
    plan(3, 30, [7, 8], 1, [(30, 35), (45, 50)]),
    plan(4, 45, [9], 1, [(45, 50), (50, 55)]),
    plan(5, 50, [7, 8], 1, [(50, 54), (55, 60)]),
]


def alternating(first: Sequence[int], second: Sequence[int]) -> list[PlanTrace]:
    """Half a second of two batches in turn, 5 ms a stage."""
    return [
        plan(
            seq,
            start,
            second if seq % 2 else first,
            1,
            [(start, start + 5), (start + 5, start + 10)],
        )
        for seq, start in enumerate(range(0, 500, 5))
    ]


def picture(plans: Sequence[PlanTrace], width: int) -> list[str]:
    text = pipeline_view(plans, num_stages=2, width=width).plain
    return [line.rstrip() for line in text.split("\n")]


def test_a_run_that_fits_is_one_strip_with_blocks_as_wide_as_they_took() -> None:
    assert picture(RUN, 75) == [
        "start    |0 ms               |20 ms              |40 ms",
        "stage 0  [===== AB ====][===== C =====][ AB]··········[ C ][AB]······  73 %",
        "stage 1  ···············[===== AB ====][===== C =====][ AB][ C ][ AB]  75 %",
        "",
        "[AB] one token each for requests A and B   [== AB ==] with prompts   · idle",
        "one column is 1 ms; at the right: how busy the stage was",
    ]


def test_wide_prompt_blocks_say_how_many_tokens() -> None:
    wide = [plan(1, 0, [1, 2], 20, [(0, 30), (30, 60)])]
    assert picture(wide, 75)[1] == f"stage 0  [======= AB 40 tokens =======]{'·' * 30}  50 %"


def test_a_long_run_shows_its_start_and_a_part_of_its_middle_on_one_scale() -> None:
    lines = picture(alternating([1], [2]), 75)
    assert lines[1] == "stage 0  " + "[A][B]" * 10 + " 100 %"
    assert lines[2] == "stage 1  ···" + "[A][B]" * 9 + "[A]  95 %"
    assert lines[4] == "later          |260 ms     |280 ms     |300 ms     |320 ms"
    assert lines[5] == "stage 0  " + "[A][B]" * 10 + " 100 %"


def test_names_without_room_are_cut_not_hidden() -> None:
    lines = picture(alternating(range(1, 13), range(13, 25)), 75)
    assert lines[1] == "stage 0  " + "[ABCDEFGH…[MNOPQRST…" * 3 + " 100 %"


def test_a_block_too_short_for_a_name_is_still_there() -> None:
    blink = plan(0, 0, [1], 1, [(2, 2.1), (5, 10)])
    lines = picture([blink, *alternating([1], [2])[1:]], 75)
    assert lines[1].startswith("stage 0  ·[·[B][A][B]")


def test_no_line_is_wider_than_asked_for() -> None:
    for width in (80, 100, 160):
        assert max(len(line) for line in picture(alternating([1, 2, 3], [4]), width)) <= width


def test_an_empty_trace_says_so() -> None:
    assert picture([], 100) == ["no batch has run yet"]
    empty = summarize([], 2)
    assert (empty.iterations, empty.duration_s, empty.mean_in_flight) == (0, 0.0, 0.0)
    assert [stage.busy for stage in empty.stages] == [0.0, 0.0]


def test_letters_run_out_after_52_requests() -> None:
    assert [letter(i) for i in (0, 25, 26, 51, 52, 999)] == ["A", "Z", "a", "z", "?", "?"]


def test_the_summary_counts_what_the_stages_did() -> None:
    summary = summarize(RUN, 2)
    assert summary.iterations == 5
    assert summary.duration_s == pytest.approx(0.060)
    assert [stage.busy for stage in summary.stages] == pytest.approx([44 / 60, 45 / 60])
    assert [stage.iterations for stage in summary.stages] == [5, 5]
    assert [stage.bytes_sent for stage in summary.stages] == [500, 0]


def test_batches_in_flight() -> None:
    assert max(count for _, count in in_flight(RUN)) == 2
    assert in_flight(RUN)[-1] == (0.060, 0)
    # Two until 55 ms (a new one is sent whenever one returns), then one for 5 ms.
    assert summarize(RUN, 2).mean_in_flight == pytest.approx((55 * 2 + 5) / 60)


def test_tables_hold_the_numbers() -> None:
    row = RequestRow(
        letter="A",
        prompt_tokens=37,
        tokens=8,
        first_token_s=0.25,
        total_s=2.0,
        finish_reason="stop",
    )
    console = Console(width=100)
    with console.capture() as capture:
        console.print(request_table([row]))
    assert capture.get().split("\n")[3].split() == ["A", "37", "8", "250", "ms", "4.0", "stop"]
    assert totals([row], summarize(RUN, 2)) == (
        "1 requests, 8 tokens in 0.1 s, 133 tokens/s. "
        "Batches in flight: at most 2, 1.92 on average."
    )


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (57_856, "58 kB"), (1_133_568, "1.1 MB")]
)
def test_amounts(num_bytes: int, text: str) -> None:
    assert amount(num_bytes) == text
