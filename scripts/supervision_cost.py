"""What supervision costs a pipeline without faults: prints CPU time an iteration, and its share.

    scripts/supervision_cost.py MODEL [--stages 3] [--pairs 5]

Stages that compute nothing (`orca_dist.stage.idle`) run one workload again and again, with
recovery on and off in turn, and with slow and fast heartbeats in turn. CPU time is that of the
master's process and all stages. The second pair gives the cost of one round of heartbeats, which
the default sends once a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from orca_dist.bench.jobs import Job, ordinary_ids
from orca_dist.bench.offline import Run
from orca_dist.config import EngineConfig
from orca_dist.engine.engine import Engine
from orca_dist.engine.local_pipeline import LocalPlacement

NUM_JOBS, PROMPT_LEN, OUT, TURNS = 32, 16, 120, 4
SLOW_S, FAST_S = 4.0, 0.1  # heartbeat_s, of which a quarter is the interval


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run of the workload."""

    cpu_s: float
    wall_s: float
    iterations: int

    @property
    def us(self) -> float:
        """CPU time an iteration."""
        return self.cpu_s / self.iterations * 1e6


def measure(model: Path, config: EngineConfig) -> Cost:
    engine = Engine.start(model, config, placement=LocalPlacement("orca_dist.stage.idle"))
    try:
        first = ordinary_ids(engine.spec.vocab_size)[0]
        jobs = [Job(prompt=(first,) * PROMPT_LEN, out=OUT) for _ in range(NUM_JOBS)]
        Run(engine, jobs).to_the_end()  # warms up
        engine.flush_trace()
        plans = len(engine.trace())
        cpu_s, wall_s = cpu_time_s(engine), time.perf_counter()
        for turn in range(1, TURNS + 1):
            Run(engine, jobs, first_id=1 + turn * NUM_JOBS).to_the_end()
        cpu_s, wall_s = cpu_time_s(engine) - cpu_s, time.perf_counter() - wall_s
        engine.flush_trace()
        return Cost(cpu_s, wall_s, len(engine.trace()) - plans)
    finally:
        engine.close()


def cpu_time_s(engine: Engine) -> float:
    pids = [None, *(stage.pid for stage in engine.info().stages)]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()

    def config(**changes: object) -> EngineConfig:
        settings = {"stages": given.stages, "launcher": "local", "device": "cpu"}
        return EngineConfig(**(settings | {"kv_tokens": 32_768} | changes))  # type: ignore[arg-type]

    kinds = {
        "recovery on": config(),
        "recovery off": config(recovery="off"),
        f"heartbeat_s {SLOW_S:g}": config(heartbeat_s=SLOW_S),
        f"heartbeat_s {FAST_S:g}": config(heartbeat_s=FAST_S),
    }
    costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    for _ in range(given.pairs):
        for kind, settings in kinds.items():
            costs[kind].append(cost := measure(given.model, settings))
            print(
                f"{kind}: {cost.us:.0f} us CPU an iteration, {cost.iterations} iterations",
                flush=True,
            )
    report(costs)


def report(costs: dict[str, list[Cost]]) -> None:
    on, off, slow, fast = costs.values()
    median_us = statistics.median(cost.us for cost in on)
    differences = [a.us - b.us for a, b in zip(on, off, strict=True)]
    print(f"recovery on - off: {statistics.median(differences):+.1f} us an iteration as a median,")
    print(f"  from {min(differences):+.1f} to {max(differences):+.1f}, of {median_us:.0f}")
    per_round = [round_us(a, b) for a, b in zip(slow, fast, strict=True)]
    us = statistics.median(per_round)
    share = us / (median_us * on[0].iterations / on[0].wall_s)
    print(f"a round of heartbeats: {us:.0f} us CPU ({min(per_round):.0f} to {max(per_round):.0f});")
    print(f"  one a second: {share:.2%} of what the pipeline uses, {us / 1e6:.3%} of a core")


def round_us(slow: Cost, fast: Cost) -> float:
    """CPU time a round, from the difference of two runs of the same iterations."""
    rounds = fast.wall_s / (FAST_S / 4) - slow.wall_s / (SLOW_S / 4)
    return (fast.us - slow.us) * slow.iterations / rounds


if __name__ == "__main__":
    main()
