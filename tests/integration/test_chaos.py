"""bench chaos and bench soak on real stages, over a tiny model: the commands as people run them."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from orca_dist.bench.chaos import Limits, Load, live_chaos
from orca_dist.bench.faults import USUAL, Fault, Round
from orca_dist.cli.main import main
from orca_dist.config import LogConfig
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.workload import Arrivals, make_workload
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import local_config

SMALL = "--device cpu --dtype float32 --kv-tokens 2048 --heartbeat-s 1 --json"
SEED_OF_FIVE = 1  # its first five rounds are five different faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


def run(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    """Exit code and document of a bench; none of its processes is left."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    code = main(["bench", *line.split()])
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == 1
    return code, document


def test_one_of_each_fault(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = f"chaos {folder} --stages 2 --rounds 5 --gap-s 0.3 --seed {SEED_OF_FIVE} {SMALL}"
    code, document = run(line, capfd)
    assert (document["lost"], document["duplicated"], document["differing"]) == (0, 0, 0)
    assert (document["rounds"], document["recoveries"], document["leaked_slots"]) == (5, 5, 0)
    assert set(document["faults"]) == set(USUAL)  # type: ignore[arg-type]
    assert code == 0


@pytest.mark.slow
def test_every_stage_meets_every_fault_and_others_are_killed_meanwhile(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = f"chaos {folder} --rounds 15 --second-share 0.3 --gap-s 0.5 --seed 1 {SMALL}"
    code, document = run(line, capfd)
    assert (document["lost"], document["duplicated"], document["differing"]) == (0, 0, 0)
    assert code == 0


@pytest.mark.slow
def test_a_stage_that_hangs_is_replaced(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = (
        f"chaos {folder} --stages 2 --rounds 2 --faults hang --step-limit-s 2 --gap-s 0.3 {SMALL}"
    )
    code, document = run(line, capfd)
    assert (document["rounds"], document["lost"], document["differing"]) == (2, 0, 0)
    assert document["detection_s"]["median"] > 1  # type: ignore[index]
    assert code == 0


@pytest.mark.slow
def test_without_recovery_all_that_runs_is_lost(folder: Path) -> None:
    """The harness says so, and ends."""
    workload = make_workload(
        num_requests=4,
        prompt_lens=Lengths(low=3, high=9),
        output_lens=Lengths(low=40, high=60),
        arrivals=Arrivals(),
        seed=0,
    )
    result = live_chaos(
        folder,
        local_config(2, recovery="off"),
        workload,
        [Round(fault=Fault.KILL, stage=1, delay_s=0.2)] * 2,
        Load(clients=4, rate=100.0, seed=0),
        Limits(notice_s=20.0, recovery_s=20.0),
        LogConfig(),
        lambda done, total: None,
    )
    assert result.lost > 0
    assert (result.duplicated, result.differing, result.rounds) == (0, 0, ())
    assert not result.is_clean


def test_a_soak_leaves_nothing_behind(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Memory apart: so few requests don't fill the caches of the matrix library."""
    line = f"soak {folder} --stages 2 --requests 300 --clients 24 --growth-limit-mb 1000 {SMALL}"
    code, document = run(line, capfd)
    assert document["requests"] == 300
    assert document["failed"] == 0
    assert document["answered"] + document["cancelled"] + document["refused"] == 300  # type: ignore[operator]
    assert min(document[end] for end in ("answered", "cancelled", "refused")) > 0  # type: ignore[type-var]
    left = ("leaked_blocks", "leaked_entries", "leaked_threads", "leaked_files")
    assert [document[name] for name in left] == [0, 0, 0, 0]
    assert code == 0
