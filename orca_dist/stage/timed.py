"""A stage that computes nothing and takes the time that a cost table says.

Everything else is real: it loads its weights, gets its plans over the control plane,
receives and sends activations, and answers. So a machine with few cores can hold a
pipeline of more stages than it could feed. As a script it is a stage process of the local
launcher; the table is the file that TIMED_STAGE_COST names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from orca_dist.sim.batch import shape_of_spans
from orca_dist.sim.table import CostTable, read_cost_table
from orca_dist.stage.batch import PackedBatch
from orca_dist.stage.idle import IdleStageWorker
from orca_dist.stage.process import main

VARIABLE = "TIMED_STAGE_COST"


class TimedStageWorker(IdleStageWorker):
    """Waits for as long as its stage of the table would compute; every token is 0."""

    def __init__(self, *, host: str) -> None:
        super().__init__(host=host)
        self._cost: CostTable = read_cost_table(Path(os.environ[VARIABLE]))

    def compute(self, x_TH: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        num_sampled = sum(entry.samples for entry in batch.sampled)
        shape = shape_of_spans(batch.context.starts, batch.context.lengths, num_sampled)
        stage = self._cost.stages[self._setup.stage % len(self._cost.stages)]
        time.sleep(stage.seconds(shape))
        return x_TH


if __name__ == "__main__":
    main(TimedStageWorker)
