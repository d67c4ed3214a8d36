"""Which configuration of a cluster serves a workload: all that fit, simulated and ranked.

Searches stages, devices a stage, batch sizes and batching policies. What can't fit
is not simulated. Nor is a larger batch size where the smaller was never reached (the
run would be the same to the last event), or a smaller one under request batching
where the larger doesn't do: rarely would it be the better one. Pure: no output, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from orca_dist.config import ScheduleConfig
from orca_dist.core import Batching, Forming
from orca_dist.scheduling import inflight
from orca_dist.sim.layouts import Layout, Misfit, Target
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.report import Report, make_report
from orca_dist.sim.simulation import Record, Setup, simulate
from orca_dist.sim.spent import TalliedCost
from orca_dist.sim.workload import Arrivals, Workload, make_workload

BATCH_SIZES = (8, 32, 128)
MICRO_BATCH_SIZE = 8  # at least, under request batching: the paper's best one
LAGGING_SHARE = 0.5  # of all requests, still out when the last one comes
IDLE_SHARE = 0.5  # of the time, from which on idle stages are what is named

OnProgress = Callable[[int, int], None]  # runs done, and in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What comes in, and the median normalised latency that it may have."""

    rate: float
    slo_s: float
    prompt_lens: Lengths
    output_lens: Lengths
    num_requests: int
    seed: int = 0

    @property
    def longest(self) -> int:
        """Slots of the longest request that may come."""
        return self.prompt_lens.longest + self.output_lens.longest

    @property
    def all_slots(self) -> int:
        """More than all requests together can fill, so that none would be missed."""
        return 2 * self.num_requests * (self.longest + ScheduleConfig().block_size)

    @property
    def out_at_slo(self) -> float:
        """Requests that are out at once where latencies are just what they may be."""
        return self.rate * self.slo_s * self.output_lens.mean

    def workload(self) -> Workload:
        """The same for every candidate: Poisson arrivals."""
        return make_workload(
            num_requests=self.num_requests,
            prompt_lens=self.prompt_lens,
            output_lens=self.output_lens,
            arrivals=Arrivals(rate=self.rate),
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """What a stage holds; bytes of all its devices together, `kv_bytes` of the pipeline's
    KV slots."""

    node: int
    num_layers: int
    weights_bytes: int
    kv_bytes: int
    room_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration that fits, and how its run went.

    `kv_tokens`: that there is room for; the run has no more than its requests could fill.
    `num_behind`: requests that were still out when the last one came.
    """

    layout: Layout
    schedule: ScheduleConfig
    stages: tuple[StageRoom, ...]
    kv_tokens: int
    report: Report
    latency_s: float
    meets_slo: bool
    num_behind: int
    keeps_up: bool
    reason: str

    @property
    def servable(self) -> bool:
        """`serve` can run it today: its stages are not sharded."""
        return self.layout.tensor_parallel == 1

    @property
    def bubble(self) -> float:
        """The stages' mean."""
        return sum(stage.bubble for stage in self.report.stages) / len(self.report.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best candidate first; and what has no room."""

    candidates: Sequence[Candidate]
    misfits: Sequence[Misfit]


def search(
    target: Target,
    demand: Demand,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    *,
    sharded_too: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Found:
    """`sharded_too`: stages of several devices are ranked among the others, not after them."""
    layouts = list(target.layouts())
    misfits = [misfit for layout in layouts if (misfit := target.misfit(layout))]
    without_room = {misfit.layout for misfit in misfits}
    families = [
        (layout, family)
        for layout in layouts
        if layout not in without_room
        for family in _families(layout, sorted(batch_sizes))
    ]
    total = sum(len(family) for _, family in families)
    workload, done = demand.workload(), 0
    found: list[Candidate] = []
    for layout, family in families:
        on_progress(done, total)
        found += _distinct(target, layout, family, demand, workload)
        done += len(family)
    on_progress(total, total)
    found.sort(key=lambda candidate: _rank(candidate, sharded_too=sharded_too))
    return Found(candidates=tuple(found), misfits=tuple(misfits))


def _rank(candidate: Candidate, *, sharded_too: bool) -> tuple[bool, bool, int, float]:
    """Those that do come first, by fewest devices and then latency; the others by latency."""
    fails = not (candidate.meets_slo and candidate.keeps_up)
    return (
        not (candidate.servable or sharded_too),
        fails,
        0 if fails else candidate.layout.num_devices,
        candidate.latency_s,
    )


def _families(layout: Layout, batch_sizes: Sequence[int]) -> Iterator[list[ScheduleConfig]]:
    """By policy, in the order in which one run may make the others needless. With one stage,
    forming makes no difference: there is one plan to share requests out to."""
    stages = layout.num_stages
    for forming in (Forming.BALANCED, Forming.PAPER)[: 2 if stages > 1 else 1]:
        yield [
            ScheduleConfig(stages=stages, max_batch_size=size, forming=forming)
            for size in batch_sizes
        ]
    yield [
        ScheduleConfig(
            stages=stages,
            max_batch_size=size,
            micro_batch_size=max(-(-size // stages), min(size, MICRO_BATCH_SIZE)),
            batching=Batching.REQUEST,
        )
        for size in reversed(batch_sizes)
    ]


def _distinct(
    target: Target,
    layout: Layout,
    family: Sequence[ScheduleConfig],
    demand: Demand,
    workload: Workload,
) -> Iterator[Candidate]:
    """Up to the run that says enough of the others."""
    kv_tokens = target.cost(layout).kv_tokens()
    for bare in family:
        schedule = replace(bare, kv_tokens=min(kv_tokens, demand.all_slots))
        cost = TalliedCost(target.cost(layout))
        record = simulate(Setup(schedule=schedule, cost=cost), workload)
        run = _Run(
            schedule=schedule,
            cost=cost,
            record=record,
            report=make_report(record),
            slo_s=demand.slo_s,
        )
        yield Candidate(
            layout=layout,
            schedule=schedule,
            stages=_rooms(target, layout, kv_tokens),
            kv_tokens=kv_tokens,
            report=run.report,
            latency_s=run.latency_s,
            meets_slo=run.meets_slo,
            num_behind=run.num_behind,
            keeps_up=run.keeps_up,
            reason=_reason(run),
        )
        if run.is_enough:
            return


def _rooms(target: Target, layout: Layout, kv_tokens: int) -> tuple[StageRoom, ...]:
    split = target.cost(layout).placement.split
    return tuple(
        StageRoom(
            node=target.node(layout, stage),
            num_layers=split[stage],
            weights_bytes=memory.weights_bytes,
            kv_bytes=kv_tokens * memory.slot_bytes,
            room_bytes=memory.room_bytes,
        )
        for stage, memory in enumerate(target.memory(layout))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One simulation, and what can be said of it."""

    schedule: ScheduleConfig
    cost: TalliedCost
    record: Record
    report: Report
    slo_s: float

    @property
    def meets_slo(self) -> bool:
        return self.latency_s <= self.slo_s

    @property
    def latency_s(self) -> float:
        """The median normalised one."""
        median_s = self.report.normalized_latency_s.p50
        assert median_s is not None, "a run has requests"
        return median_s

    @property
    def num_behind(self) -> int:
        last_s = max(self.record.arrived_s)
        return sum(end_s > last_s for end_s in self.record.ended_s)

    @property
    def keeps_up(self) -> bool:
        return self.num_behind <= LAGGING_SHARE * len(self.record.outs)

    @property
    def is_enough(self) -> bool:
        """Whether the next batch size changes nothing, or (request batching) hardly helps."""
        if self.schedule.batching is Batching.REQUEST:
            return not (self.keeps_up and self.meets_slo)
        in_full = self.record.largest_plan >= self.schedule.max_batch_size
        return not in_full and self.record.most_admitted < self.num_places

    @property
    def num_places(self) -> int:
        """Requests that may be admitted, iteration by iteration."""
        return inflight(self.schedule) * self.schedule.max_batch_size

    @property
    def lacks_memory(self) -> bool:
        """Some waited though places were free, and not for a batch to end."""
        fewest = self.record.fewest_before_queue
        if self.schedule.batching is Batching.REQUEST or fewest is None:
            return False
        return fewest < self.num_places

    @property
    def idle_share(self) -> float:
        """Of the stage that is idle most."""
        return max(stage.bubble for stage in self.report.stages)


def _reason(run: _Run) -> str:
    """By how much the bound is missed, what stands in the way of more, what takes the time."""
    name, share = run.cost.largest()
    return "; ".join([*_limits(run), f"{share:.0%} of the time is {name}"])


def _limits(run: _Run) -> Iterator[str]:
    if not run.meets_slo:
        missed_s = run.latency_s - run.slo_s
        yield f"SLO missed by {missed_s:.3g} s ({missed_s / run.slo_s:.0%})"
    if not run.keeps_up:
        yield f"falls behind: {run.num_behind} of {len(run.record.outs)} out at the last arrival"
    if preempted := run.report.preemptions:
        yield f"memory: {preempted} preemptions with {run.schedule.kv_tokens} KV slots"
    elif run.lacks_memory:
        yield (
            f"memory: requests wait, {run.record.fewest_before_queue} fill "
            f"{run.schedule.kv_tokens} KV slots"
        )
    if run.record.largest_plan >= run.schedule.max_batch_size:
        yield f"batches are full at {run.schedule.max_batch_size}"
    if run.idle_share > IDLE_SHARE:
        yield f"stages idle up to {run.idle_share:.0%}"
