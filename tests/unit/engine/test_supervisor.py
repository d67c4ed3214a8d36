"""Which stage is lost: silence, and computing for too long; never waiting for other stages."""

from __future__ import annotations

import pytest

from orca_dist.engine.supervisor import Supervisor
from orca_dist.stage.trace import StagePhase

PHASES = list(StagePhase)


@pytest.fixture
def supervisor() -> Supervisor:
    """Three stages, last heard of at 100 s."""
    return Supervisor(num_stages=3, heartbeat_s=5.0, step_limit_s=60.0, now=100.0)


def beat_all(supervisor: Supervisor, now: float) -> None:
    for stage in range(3):
        supervisor.beat(stage, "idle", 0.0, now)


def test_a_start_is_a_sign_of_life(supervisor: Supervisor) -> None:
    assert supervisor.verdict(100.0) is None
    assert supervisor.verdict(105.0) is None


def test_a_silent_stage_is_lost_and_named(supervisor: Supervisor) -> None:
    beat_all(supervisor, 104.0)
    supervisor.beat(0, "idle", 0.0, 108.0)
    supervisor.beat(2, "idle", 0.0, 108.0)
    assert supervisor.verdict(109.0) is None
    assert supervisor.verdict(109.5) == (1, "no heartbeat for 5.5 s (heartbeat_s 5)")


def test_the_first_of_several_lost_stages_is_named(supervisor: Supervisor) -> None:
    supervisor.beat(0, "idle", 0.0, 110.0)
    verdict = supervisor.verdict(111.0)
    assert verdict is not None
    assert verdict[0] == 1


def test_a_beat_makes_good_for_silence(supervisor: Supervisor) -> None:
    assert supervisor.verdict(120.0) is not None
    beat_all(supervisor, 120.0)
    assert supervisor.verdict(121.0) is None


def test_a_stage_that_computes_for_too_long_hangs(supervisor: Supervisor) -> None:
    beat_all(supervisor, 200.0)
    supervisor.beat(1, "computing", 60.0, 200.0)
    assert supervisor.verdict(200.0) is None
    supervisor.beat(1, "computing", 61.5, 200.0)
    assert supervisor.verdict(200.0) == (
        1,
        "computes one layer for 61.5 s (step_limit_s 60)",
    )


def test_a_device_that_never_ends_is_a_fault_once_nobody_computes(supervisor: Supervisor) -> None:
    """Over NCCL devices wait in links: it may be an earlier stage that keeps this one waiting."""
    beat_all(supervisor, 200.0)
    supervisor.beat(2, "awaiting", 61.5, 200.0)
    supervisor.beat(0, "computing", 59.0, 200.0)
    assert supervisor.verdict(200.0) is None
    supervisor.beat(0, "computing", 60.5, 201.5)
    verdict = supervisor.verdict(201.5)
    assert verdict is not None
    assert verdict[0] == 0
    supervisor.beat(0, "receiving", 500.0, 202.0)
    assert supervisor.verdict(202.0) == (
        2,
        "has waited for its device for 61.5 s, "
        "which a stage before it may hold up (step_limit_s 60)",
    )
    supervisor.beat(2, "awaiting", 60.0, 203.0)
    assert supervisor.verdict(203.0) is None


WAITING = [phase for phase in PHASES if phase not in ("computing", "awaiting")]


@pytest.mark.parametrize("phase", WAITING)
def test_waiting_is_never_a_fault(supervisor: Supervisor, phase: str) -> None:
    """Receiving, sending or idle for an hour: it is somebody else who lags."""
    beat_all(supervisor, 4000.0)
    supervisor.beat(1, phase, 3600.0, 4000.0)
    assert supervisor.verdict(4001.0) is None


def test_the_next_iteration_starts_its_own_clock(supervisor: Supervisor) -> None:
    beat_all(supervisor, 200.0)
    supervisor.beat(1, "computing", 61.5, 200.0)
    supervisor.beat(1, "computing", 0.5, 201.0)
    assert supervisor.verdict(201.0) is None


@pytest.mark.parametrize(
    ("heartbeat_s", "interval_s"), [(5.0, 1.0), (4.0, 1.0), (1.0, 0.25), (100.0, 1.0)]
)
def test_pings_come_several_times_within_a_heartbeat(heartbeat_s: float, interval_s: float) -> None:
    supervisor = Supervisor(num_stages=1, heartbeat_s=heartbeat_s, step_limit_s=60.0, now=0.0)
    assert supervisor.interval_s == interval_s


def test_the_masters_own_absence_is_no_stages_silence() -> None:
    """A master that was stopped for a while judges by what it could have heard."""
    supervisor = Supervisor(num_stages=2, heartbeat_s=5.0, step_limit_s=60.0, now=0.0)
    supervisor.beat(0, "idle", 0.0, 1.0)
    supervisor.excuse(20.0, 22.0)
    assert supervisor.verdict(22.0) is None
    assert supervisor.verdict(26.5) == (0, "no heartbeat for 5.5 s (heartbeat_s 5)")
