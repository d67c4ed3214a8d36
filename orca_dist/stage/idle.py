"""A stage that computes nothing: what is left is everything around the model.

It loads its weights, gets its plans over the control plane, receives and sends activations,
and answers, always with token 0. As a script it is a stage process of the local launcher, for
`orca-dist bench soak --compute off`.
"""

from __future__ import annotations

import torch

from orca_dist.proto.v1.control_pb2 import Result
from orca_dist.stage.batch import PackedBatch
from orca_dist.stage.process import main
from orca_dist.stage.worker import StageWorker


class IdleStageWorker(StageWorker):
    """Hands on what it gets."""

    def compute(self, x_TH: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        return x_TH

    def _sample(self, x_TH: torch.Tensor, batch: PackedBatch, seq: int) -> Result:
        ids = [entry.id for entry in batch.sampled if entry.samples]
        return Result(seq=seq, ids=ids, num_tokens=[1] * len(ids), tokens=[0] * len(ids))


if __name__ == "__main__":
    main(IdleStageWorker)
