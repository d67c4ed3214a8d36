"""Watch over the stages' heartbeats (pure: time is an argument).

A stage that leaves pings unanswered is dead or stopped. One that answers but
computes a single layer for too long hangs. Receiving is never the
receiver's fault: it waits for somebody else. So may the last stage's device, over
links that devices wait in: that stage is to blame once nobody computes.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTING, AWAITING = "computing", "awaiting"


@dataclass(slots=True)
class Beat:
    """The last sign of life of a stage."""

    at_s: float
    phase: str = ""
    since_s: float = 0.0


class Supervisor:
    """Says which stage is lost, if any."""

    def __init__(
        self, *, num_stages: int, heartbeat_s: float, step_limit_s: float, now: float
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._step_limit_s = step_limit_s
        self._num_stages = num_stages
        self.reset(now)

    def reset(self, now: float) -> None:
        """All stages are well: an epoch begins."""
        self._beats = [Beat(now) for _ in range(self._num_stages)]

    @property
    def interval_s(self) -> float:
        """How often to ping: several times within a heartbeat."""
        return min(1.0, self._heartbeat_s / 4)

    def beat(self, stage: int, phase: str, since_s: float, now: float) -> None:
        self._beats[stage] = Beat(now, phase, since_s)

    def excuse(self, late_s: float, now: float) -> None:
        """The master itself was away for `late_s`: no stage's silence."""
        for beat in self._beats:
            beat.at_s = min(now, beat.at_s + late_s)

    def verdict(self, now: float) -> tuple[int, str] | None:
        """The first lost stage and why."""
        for stage, beat in enumerate(self._beats):
            silent_s = now - beat.at_s
            if silent_s > self._heartbeat_s:
                return (
                    stage,
                    f"no heartbeat for {silent_s:.1f} s (heartbeat_s {self._heartbeat_s:g})",
                )
            if beat.phase == COMPUTING and beat.since_s > self._step_limit_s:
                return stage, (
                    f"computes one layer for {beat.since_s:.1f} s "
                    f"(step_limit_s {self._step_limit_s:g})"
                )
        return self._stuck_device()

    def _stuck_device(self) -> tuple[int, str] | None:
        """The stage whose device has not ended what it was given, if no stage gives it more."""
        if any(beat.phase == COMPUTING for beat in self._beats):
            return None
        for stage, beat in enumerate(self._beats):
            if beat.phase == AWAITING and beat.since_s > self._step_limit_s:
                return stage, (
                    f"has waited for its device for {beat.since_s:.1f} s, "
                    f"which a stage before it may hold up (step_limit_s {self._step_limit_s:g})"
                )
        return None
