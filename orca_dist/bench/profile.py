"""Measure a live pipeline: what its stages take for batches of every size up to a full load.

Requests of random tokens, more of them at once from phase to phase, with longer prompts from
pass to pass: so a batch's tokens and the slots that they attend to don't grow together, and
a slow minute of the machine doesn't meet all batches of one size. The trace says what each
iteration held and how long each stage computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from orca_dist.bench.calibrate import cost_document
from orca_dist.bench.jobs import Job, ordinary_ids
from orca_dist.bench.offline import WARM_UP_ID, Run
from orca_dist.config import EngineConfig, LogConfig
from orca_dist.engine.engine import Engine

PASSES = ((16, 64), (64, 192), (192, 512))  # prompt lengths
PHASES = (1, 2, 4, 8, 16, 48)  # requests at once
OUTPUTS = (8, 48)


def run_profile(
    model: Path,
    config: EngineConfig,
    log_config: LogConfig,
    *,
    seed: int,
    passes: Sequence[tuple[int, int]] = PASSES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, object]:
    """The cost table as JSON; raises what Engine.start raises.

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
        info = engine.info()
        return cost_document(
            [plan for plan in engine.trace() if WARM_UP_ID not in plan.ids],
            layers=[len(stage.layers) for stage in info.stages],
            model=Path(info.model).name,
            device=info.stages[0].device,
            kv_tokens=info.kv_tokens,
        )
    finally:
        engine.close()


def _job(rng: random.Random, ids: range, prompts: tuple[int, int], limit: int) -> Job:
    out = min(rng.randint(*OUTPUTS), max(1, limit // 4))
    prompt_len = min(rng.randint(*prompts), limit - out)
    return Job(prompt=tuple(rng.choices(ids, k=prompt_len)), out=out)
