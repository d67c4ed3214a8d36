"""When this stage did what: one row a plan, and the phase it is in right now.

Written by the compute thread, read by the control thread. Clock: wall time,
monotonic within a process (anchored once), so that rows of several stages and
nodes can be laid side by side as far as their clocks agree.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from orca_dist.proto.v1.control_pb2 import Trace


class StagePhase(StrEnum):
    """What a stage is doing, for the master's watch over hangs."""

    IDLE = "idle"
    RECEIVING = "receiving"
    COMPUTING = "computing"
    AWAITING = "awaiting"  # its device; on the last stage alone
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class Progress:
    """Last plan completed, the phase now, and since when (this stage's clock)."""

    last_seq: int
    phase: StagePhase
    since_s: float


@dataclass(slots=True)
class TraceRow:
    """Times of one plan at this stage, seconds."""

    seq: int
    received_s: float
    input_ready_s: float = 0.0
    compute_start_s: float = 0.0
    compute_end_s: float = 0.0
    sent_s: float = 0.0
    bytes_sent: int = 0


class StageTrace:
    """Rows not yet reported, and the current progress."""

    def __init__(self) -> None:
        self._anchor_s = time.time() - time.perf_counter()
        self._rows: deque[TraceRow] = deque(maxlen=100_000)
        self.progress = Progress(0, StagePhase.IDLE, self.now())

    def now(self) -> float:
        return self._anchor_s + time.perf_counter()

    def enter(self, phase: StagePhase) -> float:
        """Note a change of phase; returns its time."""
        now = self.now()
        self.progress = Progress(self.progress.last_seq, phase, now)
        return now

    def complete(self, row: TraceRow) -> None:
        self._rows.append(row)
        self.progress = Progress(row.seq, StagePhase.IDLE, self.now())

    def drain(self) -> Trace:
        """The rows collected since the last call, as columns."""
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        return Trace(
            seq=[row.seq for row in rows],
            received_s=[row.received_s for row in rows],
            input_ready_s=[row.input_ready_s for row in rows],
            compute_start_s=[row.compute_start_s for row in rows],
            compute_end_s=[row.compute_end_s for row in rows],
            sent_s=[row.sent_s for row in rows],
            bytes_sent=[row.bytes_sent for row in rows],
        )
