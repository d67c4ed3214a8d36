"""Measure a live pipeline: what its stages take for batches of every size up to a full load.

Requests of random tokens, more of them at once from phase to phase, with longer prompts from
pass to pass: so a batch's tokens and the slots that they attend to don't grow together, and
a slow minute of the machine doesn't meet all batches of one size. The trace says what each
iteration held and how long each stage computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_dist.bench.best_split import BestSplit, best_split
from orca_dist.bench.calibrate import compute_s, cost_document
from orca_dist.bench.jobs import Job, ordinary_ids
from orca_dist.bench.offline import WARM_UP_ID, Run
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.engine.engine import Engine
from orca_dist.metrics.trace import PlanTrace

PASSES = ((16, 64), (64, 192), (192, 512))  # prompt lengths
PHASES = (1, 2, 4, 8, 16, 48)  # requests at once
OUTPUTS = (8, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The cost table as JSON, and the split that it speaks for."""

    table: dict[str, object]
    split: BestSplit


def run_profile(
    model: Path,
    config: EngineConfig,
    log_config: LogConfig,
    *,
    seed: int,
    passes: Sequence[tuple[int, int]] = PASSES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Raises what Engine.start raises.

    `passes`: the least and the longest prompt of each.
    """
    engine = Engine.start(model, config, log_config=log_config)
    try:
        limit = min(engine.max_model_len, engine.kv_tokens // max(PHASES))
        rng, ids = random.Random(seed), ordinary_ids(engine.spec.vocab_size)
        phases = [(prompts, num) for prompts in passes for num in PHASES]
        for done, (prompts, num) in enumerate(phases):
            on_progress(done, len(phases))
            jobs = [_job(rng, ids, prompts, limit) for _ in range(num)]
            Run(engine, jobs, first_id=1 + 1000 * done).to_the_end()
        engine.flush_trace()
        plans = [plan for plan in engine.trace() if WARM_UP_ID not in plan.ids]
        info = engine.info()
        layers = [len(stage.layers) for stage in info.stages]
        table = cost_document(
            plans,
            layers=layers,
            model=Path(info.model).name,
            device=info.stages[0].device,
            kv_tokens=info.kv_tokens,
        )
        return Profile(table=table, split=_split(plans, table, layers))
    finally:
        engine.close()


def _split(
    plans: Sequence[PlanTrace], table: Mapping[str, Any], layers: Sequence[int]
) -> BestSplit:
    busy_s = [sum(compute_s(plan.spans[stage]) for plan in plans) for stage in range(len(layers))]
    sampled_s = table["stages"][-1]["sampled"][1][1]  # one row
    return best_split(layers, busy_s, sampled_s * sum(plan.num_sampled for plan in plans))


def _job(rng: random.Random, ids: range, prompts: tuple[int, int], limit: int) -> Job:
    out = min(rng.randint(*OUTPUTS), max(1, limit // 4))
    prompt_len = min(rng.randint(*prompts), limit - out)
    return Job(prompt=tuple(rng.choices(ids, k=prompt_len)), out=out)
