"""Collects what happened when: every plan at the master and at each stage.

Written by the engine master's thread, read by anyone through snapshot(). What is
made of it (summaries, the picture) is the metrics package's business.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from orca_dist.core import Plan
from orca_dist.metrics.trace import PlanTrace, StageSpan
from orca_dist.proto.v1 import control_pb2 as pb

MAX_PLANS = 20_000


class TraceLog:
    """The last MAX_PLANS plans, oldest first."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self._plans: OrderedDict[int, PlanTrace] = OrderedDict()
        self._lock = threading.Lock()

    def sent(self, plan: Plan, control_bytes: int, now: float) -> None:
        with self._lock:
            self._plans[plan.seq] = PlanTrace(
                seq=plan.seq,
                ids=tuple(plan.ids),
                lengths=tuple(plan.lengths),
                starts=tuple(plan.starts),
                num_sampled=sum(plan.samples),
                sent_s=now,
                control_bytes=control_bytes,
            )
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)

    def returned(self, seq: int, now: float) -> None:
        with self._lock:
            if plan := self._plans.get(seq):
                plan.returned_s = now

    def add_rows(self, stage: int, rows: pb.Trace) -> None:
        columns = zip(
            rows.seq,
            rows.received_s,
            rows.input_ready_s,
            rows.compute_start_s,
            rows.compute_end_s,
            rows.sent_s,
            rows.bytes_sent,
            strict=True,
        )
        with self._lock:
            for seq, received, ready, start, end, sent, num_bytes in columns:
                if plan := self._plans.get(seq):
                    plan.spans[stage] = StageSpan(
                        received_s=received,
                        input_ready_s=ready,
                        compute_start_s=start,
                        compute_end_s=end,
                        sent_s=sent,
                        bytes_sent=num_bytes,
                    )

    def snapshot(self) -> list[PlanTrace]:
        """The plans that have returned, with their rows of all stages, oldest first."""
        with self._lock:
            return [
                plan
                for plan in self._plans.values()
                if plan.returned_s is not None and len(plan.spans) == self.num_stages
            ]


class TraceFlush:
    """A wait for every stage's answer to one ping; rows of all that it has done come with it."""

    def __init__(self, num_stages: int) -> None:
        self._missing = set(range(num_stages))
        self._nonce = 0
        self._over = threading.Event()

    def expect(self, nonce: int) -> None:
        """Answers to this ping count, and to later ones."""
        self._nonce = nonce

    def answered(self, stage: int, nonce: int) -> bool:
        """Note an answer; True once no stage's is missing."""
        if nonce >= self._nonce:
            self._missing.discard(stage)
        if not self._missing:
            self._over.set()
        return not self._missing

    def give_up(self) -> None:
        """No more answers will come."""
        self._over.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether all stages have answered, within `timeout_s`."""
        return self._over.wait(timeout_s) and not self._missing
