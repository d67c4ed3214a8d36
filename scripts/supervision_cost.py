"""What supervision costs a pipeline without faults, in CPU time.

    scripts/supervision_cost.py MODEL [--stages 3] [--pairs 5]

CPU time is that of the master's process and of all stages, which compute nothing
(`orca_dist.stage.idle`). Heartbeats are counted on an idle pipeline, so that nothing else
drowns them: what many of them in a second take, less what one takes. Recovery costs only where
it might slow an iteration down: one workload, with it on and off in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from orca_dist.bench.jobs import Job, ordinary_ids
from orca_dist.bench.offline import Run
from orca_dist.config import EngineConfig
from orca_dist.engine.engine import Engine
from orca_dist.engine.local_pipeline import LocalPlacement

NUM_JOBS, PROMPT_LEN, OUT, TURNS = 32, 16, 120, 4
HEARTBEAT_S, OFTEN_S = 4.0, 0.1  # heartbeat_s, of which a quarter is the interval
IDLE_S = 10.0


@contextmanager
def running(model: Path, stages: int, heartbeat_s: float, recovery: str) -> Iterator[Engine]:
    config = EngineConfig(
        stages=stages,
        launcher="local",  # type: ignore[arg-type]
        device="cpu",  # type: ignore[arg-type]
        kv_tokens=32_768,
        heartbeat_s=heartbeat_s,
        recovery=recovery,  # type: ignore[arg-type]
    )
    engine = Engine.start(model, config, placement=LocalPlacement("orca_dist.stage.idle"))
    try:
        yield engine
    finally:
        engine.close()


def cpu_time_s(engine: Engine) -> float:
    pids = [None, *(stage.pid for stage in engine.info().stages)]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def idle_cpu_s(engine: Engine) -> float:
    before_s = cpu_time_s(engine)
    time.sleep(IDLE_S)
    return cpu_time_s(engine) - before_s


def us_an_iteration(engine: Engine) -> float:
    first = ordinary_ids(engine.spec.vocab_size)[0]
    jobs = [Job(prompt=(first,) * PROMPT_LEN, out=OUT) for _ in range(NUM_JOBS)]
    Run(engine, jobs).to_the_end()  # warms up
    engine.flush_trace()
    plans, before_s = len(engine.trace()), cpu_time_s(engine)
    for turn in range(1, TURNS + 1):
        Run(engine, jobs, first_id=1 + turn * NUM_JOBS).to_the_end()
    used_s = cpu_time_s(engine) - before_s
    engine.flush_trace()
    return used_s / (len(engine.trace()) - plans) * 1e6


def heartbeats(model: Path, stages: int) -> None:
    with running(model, stages, HEARTBEAT_S, "on") as engine:
        seldom_s = idle_cpu_s(engine)
    with running(model, stages, OFTEN_S, "on") as engine:
        often_s = idle_cpu_s(engine)
    rounds = IDLE_S * (4 / OFTEN_S - 4 / HEARTBEAT_S)
    us = (often_s - seldom_s) / rounds * 1e6
    print(
        f"a heartbeat of {stages} stages: {us:.0f} us of CPU, of {rounds:.0f} more in {IDLE_S:g} s;"
    )
    print(f"  idle, with one a second, the pipeline takes {seldom_s / IDLE_S:.2%} of a core")


def recovery(model: Path, stages: int, pairs: int) -> None:
    differences = []
    for _ in range(pairs):
        with running(model, stages, HEARTBEAT_S, "on") as engine:
            on = us_an_iteration(engine)
        with running(model, stages, HEARTBEAT_S, "off") as engine:
            off = us_an_iteration(engine)
        print(f"recovery on: {on:.0f} us of CPU an iteration, off: {off:.0f}", flush=True)
        differences.append(on - off)
    if differences:
        print(f"  {statistics.median(differences):+.0f} us as a median of {pairs} pairs")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    heartbeats(given.model, given.stages)
    recovery(given.model, given.stages, given.pairs)


if __name__ == "__main__":
    main()
