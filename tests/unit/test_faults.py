"""The arithmetic of bench chaos: which fault meets whom, and what counts as a wrong answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest

from orca_dist.bench.chaos import ChaosResult, RoundTimes, sampling_of
from orca_dist.bench.faults import USUAL, Fault, Round, make_rounds, parse_faults
from orca_dist.bench.ledger import Answer, Ledger, Verdict, judge
from orca_dist.cli.bench_chaos import _document, _lines
from orca_dist.cli.main import main
from orca_dist.core import FinishReason, Output
from orca_dist.errors import ConfigError

LENGTH, ERROR = FinishReason.LENGTH, FinishReason.ERROR
EXPECTED = Answer(tokens=[1, 2, 3], reason=LENGTH)


def rounds(num: int, seed: int = 0) -> list[Round]:
    made = make_rounds(USUAL, 3, max_delay_s=2.0, seed=seed)
    return list(itertools.islice(made, num))


def test_every_stage_meets_every_fault_before_any_does_again() -> None:
    pairs = [(each.fault, each.stage) for each in rounds(30)]
    assert sorted(pairs[:15]) == sorted(pairs[15:]) == sorted(itertools.product(USUAL, range(3)))
    assert pairs[:15] != pairs[15:], "in another order"


def test_same_seed_same_rounds() -> None:
    assert rounds(20) == rounds(20)
    assert rounds(20) != rounds(20, seed=1)
    assert all(0 <= each.delay_s <= 2.0 for each in rounds(20))


def test_faults_are_words_with_commas() -> None:
    assert parse_faults("stop, kill,stop") == (Fault.STOP, Fault.KILL)
    with pytest.raises(ConfigError, match="faults = kil: 'kil' is none of kill, stop"):
        parse_faults("kil")


@pytest.mark.parametrize(
    ("tokens", "reason", "verdict"),
    [
        ([1, 2, 3], LENGTH, Verdict.RIGHT),
        ([1, 2, 3], FinishReason.STOP, Verdict.DIFFERING),
        ([1, 2, 4], LENGTH, Verdict.DIFFERING),
        ([1, 2], LENGTH, Verdict.DIFFERING),
        ([1, 2, 2, 3], LENGTH, Verdict.DUPLICATED),
        ([1, 2, 3], ERROR, Verdict.LOST),
        ([1, 2, 3], FinishReason.CANCELLED, Verdict.LOST),
        ([1, 2, 3], None, Verdict.LOST),
    ],
)
def test_verdicts(tokens: list[int], reason: FinishReason | None, verdict: Verdict) -> None:
    assert judge(Answer(tokens=tokens, reason=reason), EXPECTED) is verdict


def told(*outputs: Output, ids: Sequence[int] = (1,)) -> dict[Verdict, int]:
    """How many of which verdict there are once all is over."""
    ledger = Ledger()
    for id in ids:
        ledger.sent(id, EXPECTED)
    ledger.note(outputs)
    ledger.give_up("the run is over")
    assert not ledger.live
    return {verdict: n for verdict in Verdict if (n := ledger.count(verdict))}


def test_tokens_add_up_over_outputs() -> None:
    assert told(Output(1, [1]), Output(1, [2, 3], LENGTH)) == {Verdict.RIGHT: 1}


def test_a_request_that_never_ends_is_lost() -> None:
    assert told(Output(1, [1, 2, 3], LENGTH), ids=(1, 2)) == {Verdict.RIGHT: 1, Verdict.LOST: 1}


def test_what_comes_after_the_end_is_a_duplicate() -> None:
    assert told(Output(1, [1, 2, 3], LENGTH), Output(1, [3])) == {Verdict.DUPLICATED: 1}


def test_what_nobody_asked_for_is_a_duplicate() -> None:
    assert told(Output(7, [1]), ids=()) == {Verdict.DUPLICATED: 1}


def test_wrong_answers_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    told(Output(1, [1, 2, 9], LENGTH))
    (record,) = caplog.records
    assert "request 1 is differing" in record.getMessage()
    assert "[1, 2, 9]" in record.getMessage()
    assert "[1, 2, 3]" in record.getMessage()


def test_greedy_and_seeded_requests_take_turns() -> None:
    kinds = [sampling_of(index) for index in range(4)]
    assert [sampling.temperature for sampling in kinds] == [0.0, 1.0, 0.0, 1.0]
    assert kinds[1].seed != kinds[3].seed


def times(fault: Fault, *seconds: float) -> RoundTimes:
    detection_s, recovery_s, first_token_s = seconds
    return RoundTimes(
        fault=fault,
        stage=0,
        detection_s=detection_s,
        recovery_s=recovery_s,
        first_token_s=first_token_s,
    )


RESULT = ChaosResult(
    requests=40,
    lost=0,
    duplicated=0,
    differing=0,
    recoveries=4,
    leaked_slots=0,
    rounds=(
        times(Fault.KILL, 0.1, 4.0, 4.5),
        times(Fault.STOP, 5.0, 9.0, 9.5),
        times(Fault.KILL, 0.3, 6.0, 6.5),
    ),
)


def test_figures_are_medians_and_maxima_of_all_and_of_each_fault() -> None:
    document = _document(RESULT)
    assert document["rounds"] == 3
    assert document["recoveries"] == 4
    assert document["detection_s"] == {"median": 0.3, "max": 5.0}
    assert document["recovery_s"] == {"median": 6.0, "max": 9.0}
    assert document["faults"] == {
        "kill": {
            "rounds": 2,
            "detection_s": {"median": 0.2, "max": 0.3},
            "recovery_s": {"median": 5.0, "max": 6.0},
            "first_token_s": {"median": 5.5, "max": 6.5},
        },
        "stop": {
            "rounds": 1,
            "detection_s": {"median": 5.0, "max": 5.0},
            "recovery_s": {"median": 9.0, "max": 9.0},
            "first_token_s": {"median": 9.5, "max": 9.5},
        },
    }
    json.dumps(document)


def test_the_table_has_a_row_for_each_fault_and_one_for_all() -> None:
    head, _, _, _, *rows = _lines(RESULT)
    assert head.startswith("3 faults, 4 recoveries, 40 requests: 0 lost, 0 duplicated, 0 differing")
    assert [row.split()[:2] for row in rows] == [["kill", "2"], ["stop", "1"], ["all", "3"]]
    assert rows[1].split()[2:] == ["5.00", "5.00", "9.00", "9.00", "9.50", "9.50"]


@pytest.mark.parametrize("name", ["lost", "duplicated", "differing", "leaked_slots"])
def test_any_wrong_answer_spoils_a_run(name: str) -> None:
    import dataclasses

    assert RESULT.is_clean
    assert not dataclasses.replace(RESULT, **{name: 1}).is_clean


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rounds 0", "rounds = 0: must be at least 1"),
        ("--prompts 1", "prompts = 1: must be at least 2"),
        ("--clients 0", "clients = 0: must be at least 1"),
        ("--rate 0", "rate = 0.0: must be more than 0"),
        ("--gap-s -1", "gap_s = -1.0: must be at least 0"),
        ("--faults fire", "faults = fire: 'fire' is none of kill, stop"),
        ("--recovery off", "recovery = off: the first fault would be the last"),
        ("--launcher ray", "the stages of --launcher ray don't obey exception, netcut, hangup"),
        ("--launcher ray --faults kill --ray-address auto", "ray_address = auto: faults are"),
        ("--stages 1", "a single stage has no links to cut"),
        ("--prompt-lens x", "prompt_lens = x"),
    ],
)
def test_bad_command_lines(flags: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "chaos", "nowhere", *flags.split()]) == 2
    assert message in capfd.readouterr().err
