"""How near a workload comes to the time that its matmuls take, and where the rest goes.

The workload of bench.offline is run; from its trace come the rows of each iteration.
Then the matmuls alone are timed for these very numbers of rows, on all stages at once,
each in a process of its own with as many threads: what stages take from each other, by
sharing caches, memory and cores, they take there too. On GPUs only the last stage waits for its
device: what others compute for is the time to give it work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orca_dist.bench.matmuls import Round, Seconds, StageMatmuls
from orca_dist.bench.offline import OfflineResult, OfflineRun
from orca_dist.config import EngineConfig, Launcher
from orca_dist.engine.settle import cpus_per_stage, settle_device, settle_dtype
from orca_dist.errors import ConfigError, StartupError
from orca_dist.metrics.trace import PlanTrace, StageSpan
from orca_dist.spec import ModelSpec, load_spec

MATMULS_MODULE = "orca_dist.bench.matmuls"
MAX_COUNTS = 32  # numbers of rows that are timed; those between are interpolated


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShares:
    """Where the wall time of a stage goes; all but matmul_s and other_compute_s add up to it.

    computing_s = matmul_s + other_compute_s (which noise can make negative). receiving_s: it has
    a plan, and packs its batch or waits for the stage before it. waiting_s: it has no plan.
    weight_read_s: to read its matrices once an iteration, at read_gb_s, which is the most that
    its threads get while all stages read.
    """

    weight_bytes: int
    matmul_s: float
    other_compute_s: float
    computing_s: float
    receiving_s: float
    sending_s: float
    waiting_s: float
    read_gb_s: float
    weight_read_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """`share`: matmul_s of the stage that has most of it, over the wall time."""

    offline: OfflineResult
    dtype: str
    threads_per_stage: int
    distinct_rows: int
    timed_rows: int
    matmul_s: float
    busiest_stage: int
    share: float
    stages: tuple[StageShares, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How many iterations had how many rows, and how many of them that sample."""

    batch: Counter[int]
    sampled: Counter[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds by rows, of a stage's layers and of its head; bytes read in a second.

    `layer_bytes`, `head_bytes`: of their matrices; the head is read where anybody samples.
    """

    layers: Mapping[int, float]
    head: Mapping[int, float]
    read_bytes_s: float
    layer_bytes: int
    head_bytes: int


def check_roofline(config: EngineConfig) -> None:
    """Raises ConfigError where stages would not be on this machine."""
    if config.ray_address:
        raise ConfigError(
            f"ray_address = {config.ray_address}: roofline times this machine's matmuls; leave it "
            "out"
        )


def check_plain(spec: ModelSpec) -> None:
    """Raises ConfigError for a model with experts."""
    if spec.experts is not None:
        raise ConfigError(
            f"model: of {spec.experts.num_experts} experts a trace doesn't say how many rows each "
            "had, so their matmuls can't be timed alone; give a model without"
        )


def make_roofline(
    model: Path,
    config: EngineConfig,
    run: OfflineRun,
    *,
    rounds: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Roofline:
    """Times the matmuls of what was run; `on_progress` hears of its rounds."""
    spec = load_spec(model)
    device = settle_device(config.device)
    dtype = settle_dtype(config.dtype, spec, device)
    threads = max(1, int(cpus_per_stage(config)))
    stages = [
        StageMatmuls(
            model=str(model.resolve()),
            device=device,
            gpu=stage if config.launcher is Launcher.RAY else 0,  # local stages share the first
            num_layers=len(layers),
            has_head=layers.stop == spec.num_layers,
            dtype=dtype,
            num_threads=threads,
        )
        for stage, layers in enumerate(run.layers)
    ]
    rows = rows_of(run.plans)
    wanted = Round(rows=chosen(rows.batch), sampled=chosen(rows.sampled))
    timed = time_stages(stages, wanted, rounds, on_progress)
    shares = [
        stage_shares(run.plans, index, run.result.wall_s, times)
        for index, times in enumerate(timed)
    ]
    matmul_s = [each.matmul_s for each in shares]
    return Roofline(
        offline=run.result,
        dtype=dtype,
        threads_per_stage=threads,
        distinct_rows=len(rows.batch),
        timed_rows=len(wanted.rows),
        matmul_s=sum(matmul_s),
        busiest_stage=matmul_s.index(max(matmul_s)),
        share=max(matmul_s) / run.result.wall_s,
        stages=tuple(shares),
    )


# ---- what was run --------------------------------------------------------


def rows_of(plans: Sequence[PlanTrace]) -> Rows:
    """Iterations in which nobody samples don't touch the head."""
    return Rows(
        batch=Counter(sum(plan.lengths) for plan in plans),
        sampled=Counter(plan.num_sampled for plan in plans if plan.num_sampled),
    )


def chosen(counts: Counter[int], most: int = MAX_COUNTS) -> list[int]:
    """Which to time, in order: all, or the commonest half of `most` and others spread evenly."""
    ordered = sorted(counts)
    if len(ordered) <= most:
        return ordered
    commonest = {rows for rows, _ in counts.most_common(most // 2)}
    places = np.linspace(0, len(ordered) - 1, most - len(commonest)).round().astype(int)
    return sorted(commonest | {ordered[place] for place in places})


def interpolated(timed: Mapping[int, float], rows: int) -> float:
    """Seconds for `rows`, on the line between the nearest that were timed."""
    known = sorted(timed)
    return float(np.interp(rows, known, [timed[each] for each in known]))


# ---- where a stage's time went -------------------------------------------


def stage_shares(
    plans: Sequence[PlanTrace], stage: int, wall_s: float, times: StageTimes
) -> StageShares:
    """What no phase accounts for is waiting."""
    spans = sorted((plan.spans[stage] for plan in plans), key=lambda span: span.compute_start_s)
    computing_s = sum(span.compute_end_s - span.compute_start_s for span in spans)
    sending_s = sum(span.sent_s - span.compute_end_s for span in spans)
    receiving_s = sum(_receiving(spans))
    matmul_s = sum(_matmul_s(plan, times) for plan in plans)
    num_bytes = sum(
        times.layer_bytes + (times.head_bytes if plan.num_sampled else 0) for plan in plans
    )
    return StageShares(
        weight_bytes=times.layer_bytes + times.head_bytes,
        matmul_s=matmul_s,
        other_compute_s=computing_s - matmul_s,
        computing_s=computing_s,
        receiving_s=receiving_s,
        sending_s=sending_s,
        waiting_s=wall_s - computing_s - receiving_s - sending_s,
        read_gb_s=times.read_bytes_s / 1e9,
        weight_read_s=num_bytes / times.read_bytes_s,
    )


def _receiving(spans: Sequence[StageSpan]) -> Iterator[float]:
    """From when a plan is there and the one before is done to when its input is there."""
    done_s = -math.inf
    for span in spans:
        yield span.compute_start_s - max(span.received_s, done_s)
        done_s = span.sent_s


def _matmul_s(plan: PlanTrace, times: StageTimes) -> float:
    layers_s = interpolated(times.layers, sum(plan.lengths))
    return layers_s + (interpolated(times.head, plan.num_sampled) if plan.num_sampled else 0.0)


# ---- the matmuls alone ---------------------------------------------------


def time_stages(
    stages: Sequence[StageMatmuls],
    wanted: Round,
    rounds: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[StageTimes]:
    """Medians over `rounds`, each of which all stages go through at once; one more warms up.

    Raises StartupError where a process ends before its time.
    """
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_process(stage)) for stage in stages]
        answers: list[list[Seconds]] = [[] for _ in stages]
        for done in range(rounds + 1):
            on_progress(done, rounds + 1)
            for process in processes:
                _tell(process, wanted)
            for process, mine in zip(processes, answers, strict=True):
                mine.append(_answer(process))
    return [medians(wanted, mine[1:]) for mine in answers]


def medians(wanted: Round, answers: Sequence[Seconds]) -> StageTimes:
    """Of the same number of rows over all rounds."""
    layers = zip(*(each.layers for each in answers), strict=True)
    head = zip(*(each.head for each in answers), strict=True)
    return StageTimes(
        layers=dict(zip(wanted.rows, map(statistics.median, layers), strict=True)),
        head=dict(zip(wanted.sampled, map(statistics.median, head), strict=True)),
        read_bytes_s=statistics.median(each.read_bytes_s for each in answers),
        layer_bytes=answers[0].layer_bytes,
        head_bytes=answers[0].head_bytes,
    )


@contextlib.contextmanager
def _process(stage: StageMatmuls) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MATMULS_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    try:
        _tell(process, stage)
        yield process
    finally:
        process.kill()
        process.communicate()


def _tell(process: subprocess.Popen[str], what: StageMatmuls | Round) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its answer will be missing
        process.stdin.write(json.dumps(dataclasses.asdict(what)) + "\n")
        process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> Seconds:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise StartupError("a process that times matmuls has ended; see its output above")
    return Seconds(**json.loads(line))
