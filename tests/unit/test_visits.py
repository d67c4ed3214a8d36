"""The arithmetic of bench soak: who visits, and what counts as left behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orca_dist.bench.soak import Footprint, SoakResult
from orca_dist.bench.visits import LEAVING, Manner, Sizes, Visit, make_visits
from orca_dist.cli.main import main

SIZES = Sizes(prompt_len=6, out=4, ids=range(256, 320), max_model_len=64)


def visits(num: int, *, cancel: float = 0.3, bad: float = 0.05, seed: int = 0) -> list[Visit]:
    return list(make_visits(num, SIZES, cancel_share=cancel, bad_share=bad, seed=seed))


def test_shares_are_as_asked() -> None:
    counts = Counter(visit.manner for visit in visits(4000))
    assert 0.27 < sum(counts[manner] for manner in LEAVING) / 4000 < 0.33
    assert 0.035 < counts[Manner.BAD] / 4000 < 0.065
    assert min(counts[manner] for manner in LEAVING) > 300
    assert {visit.manner for visit in visits(50, cancel=0, bad=0)} == {Manner.STAY}
    assert {visit.manner for visit in visits(50, cancel=0, bad=1)} == {Manner.BAD}


def test_same_seed_same_visits() -> None:
    assert visits(50) == visits(50)
    assert visits(50) != visits(50, seed=1)


def test_good_ones_fit_and_end_in_every_way() -> None:
    good = visits(500, cancel=0.3, bad=0)
    assert {len(visit.prompt) for visit in good} == set(range(1, 7))
    assert {visit.params.max_tokens for visit in good} == set(range(1, 5))
    assert {token in SIZES.ids for visit in good for token in visit.prompt} == {True}
    leaving = [visit for visit in good if visit.manner is Manner.LEAVE_AFTER_TOKENS]
    assert {visit.num_tokens for visit in leaving} == set(range(1, 5))


def test_some_begin_alike_and_some_do_not() -> None:
    starts = Counter(visit.prompt[:3] for visit in visits(300) if len(visit.prompt) > 3)
    assert starts.most_common(1)[0][1] > 20
    assert list(starts.values()).count(1) > 20


RESULT = SoakResult(
    requests=100,
    answered=65,
    cancelled=30,
    refused=5,
    failed=0,
    preempted=3,
    leaked_blocks=0,
    leaked_entries=0,
    warm=Footprint(rss_mb=(100.0, 200.0), threads=(10, 20), files=(30, 40)),
    end=Footprint(rss_mb=(104.0, 190.0), threads=(10, 19), files=(29, 40)),
)


def test_growth_is_of_the_process_that_grew_most() -> None:
    assert RESULT.rss_growth_mb == 4.0
    assert (RESULT.leaked_threads, RESULT.leaked_files) == (0, 0)
    grown = replace(RESULT, end=replace(RESULT.end, threads=(10, 23), files=(31, 38)))
    assert (grown.leaked_threads, grown.leaked_files) == (3, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"failed": 1},
        {"leaked_blocks": 1},
        {"leaked_entries": 1},
        {"end": replace(RESULT.end, threads=(11, 20))},
        {"end": replace(RESULT.end, files=(30, 41))},
    ],
)
def test_whatever_is_left_spoils_a_run(changes: dict[str, object]) -> None:
    assert RESULT.is_clean
    assert not replace(RESULT, **changes).is_clean  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--requests 7", "requests = 7: must be at least 8"),
        ("--clients 0", "clients = 0: must be at least 1"),
        ("--out 0", "out = 0: must be at least 1"),
        ("--cancel-share 1.5", "cancel_share = 1.5: must be in [0, 1]"),
        ("--cancel-share 0.9 --bad-share 0.2", "with bad_share = 0.2 more than 1"),
        ("--compute off --launcher ray", "the stages of --launcher ray always compute"),
    ],
)
def test_bad_command_lines(flags: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "soak", "nowhere", *flags.split()]) == 2
    assert message in capfd.readouterr().err
