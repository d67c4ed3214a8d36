"""A stage that computes nothing, so that what is left is everything around it.

It reads no weights and keeps no KV, gets its plans over the control plane, passes one
number on to the next stage, and answers with ordinary token ids in turn. A pipeline of
many such stages costs a small machine little: `orca-dist bench frontend` runs the front
and the engine master on it. As a script it is a stage process of the local launcher;
BLANK_STAGE_WAIT_S says how long it takes over a plan.
"""

from __future__ import annotations

import os
import time

import torch
from orca_kernels import AttentionContext

from orca_dist.proto.v1.control_pb2 import Loaded, Plan, Result, Sampling, Setup
from orca_dist.stage.batch import PackedBatch, RequestTable
from orca_dist.stage.device import CpuDevice
from orca_dist.stage.process import main
from orca_dist.stage.sampler import Sampled
from orca_dist.stage.weights import OnBytes
from orca_dist.stage.worker import Iteration, StageWorker
from orca_dist.transport.channel import Channel

VARIABLE = "BLANK_STAGE_WAIT_S"
ROOM_BYTES = 1 << 60  # for KV that nobody keeps
FIRST_TOKEN, STRIDE = 256, 31  # ids before the first are often special, or single bytes
NOTHING = torch.empty(0, dtype=torch.long)
NO_CONTEXT = AttentionContext(starts=[], lengths=[], blocks=[], slots_T=NOTHING)


class BlankTable(RequestTable):
    """Knows no request: batches hold who samples, and no rows."""

    def __init__(self, *, samples: bool) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return 0

    def apply(self, plan: Plan) -> None:
        """Nothing of it is kept."""

    def pack(self, plan: Plan) -> PackedBatch:
        return PackedBatch(
            token_ids_T=NOTHING,
            positions_T=NOTHING,
            context=NO_CONTEXT,
            sampled=_sampled(plan) if self._samples else [],
            sampled_rows_R=NOTHING,
            parameters_EP=NOTHING,
        )


class BlankStageWorker(StageWorker):
    """Waits, and lets the token follow from its position alone."""

    def __init__(self, *, host: str) -> None:
        super().__init__(host=host)
        self._wait_s = float(os.environ.get(VARIABLE, "0"))

    def load(self, setup: Setup, on_bytes: OnBytes = lambda done, total: None) -> Loaded:
        torch.set_num_threads(1)
        self._setup, self._device = setup, CpuDevice()
        return Loaded(
            device="cpu",
            node_bytes=ROOM_BYTES,
            store_address=self._host_store() if setup.stage == 0 else "",
        )

    def begin(
        self, previous: Channel | None, following: Channel | None, *, num_blocks: int
    ) -> None:
        self._previous, self._next = previous, following
        self._table = BlankTable(samples=self._is_last)

    def compute(self, x_TH: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        if self._wait_s:
            time.sleep(self._wait_s)
        return x_TH

    def _room(self, batch: PackedBatch) -> torch.Tensor:
        """For one number, so that plans go from stage to stage in order."""
        return torch.zeros(1)

    def _input(self, iteration: Iteration) -> torch.Tensor:
        return torch.zeros(1) if iteration.x_TH is None else super()._input(iteration)

    def _sample(self, x_TH: torch.Tensor, batch: PackedBatch, seq: int) -> Result:
        num_ids = self._setup.num_token_ids
        first = min(FIRST_TOKEN, num_ids - 1)
        return Result(
            seq=seq,
            ids=[entry.id for entry in batch.sampled],
            num_tokens=[1] * len(batch.sampled),
            tokens=[first + entry.position * STRIDE % (num_ids - first) for entry in batch.sampled],
        )


def _sampled(plan: Plan) -> list[Sampled]:
    columns = zip(plan.ids, plan.starts, plan.lengths, plan.samples, strict=True)
    return [
        Sampled(id=id, rows=range(0), samples=True, position=start + length, sampling=Sampling())
        for id, start, length, samples in columns
        if samples
    ]


if __name__ == "__main__":
    main(BlankStageWorker)
