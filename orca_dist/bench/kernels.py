"""CPU kernels against what they replace, on shapes that a served model meets.

A kernel is one entry of KERNELS: from a Setting it makes the two calls of a Contest, which
do the same work on the same inputs. They take turns, so that a slow moment of the machine
meets both. That they agree is the tests' business.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from orca_kernels import AttentionContext, reference
from orca_kernels.cpu.attention import make_cpu_attention
from orca_kernels.cpu.build import BuildError

from orca_dist.errors import ConfigError
from orca_dist.spec import ModelSpec

BLOCK_SIZE = 16
MIN_SAMPLE_S = 0.002  # a sample repeats its call until it takes about so long
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A batch: (start, length) of each request's part of it."""

    name: str
    spans: tuple[tuple[int, int], ...]

    @property
    def num_rows(self) -> int:
        return sum(length for _, length in self.spans)


SHAPES = (
    *(
        Shape(name=f"decode {num} at {context}", spans=((context - 1, 1),) * num)
        for num in (1, 16)
        for context in (64, 512, 2048)
    ),
    Shape(name="prefill 512", spans=((0, 512),)),
    Shape(name="mixed", spans=(((511, 1),) * 15 + ((256, 256),))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a contest is about."""

    spec: ModelSpec
    shape: Shape
    dtype: torch.dtype
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The same work twice."""

    kernel: Call
    reference: Call


def attention(setting: Setting) -> Contest:
    """One layer's paged attention, requests' blocks scattered over the cache."""
    spec, spans = setting.spec, setting.shape.spans
    context = _context(spans)
    cache = (len(context.flat_blocks), BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    k_BSMD, v_BSMD = (torch.randn(cache).to(setting.dtype) for _ in range(2))
    heads = (setting.shape.num_rows, spec.num_heads, spec.head_dim)
    q_TND = torch.randn(heads).to(setting.dtype)
    arguments = (q_TND, k_BSMD, v_BSMD, context, spec.attention_scale)
    kernel = make_cpu_attention(setting.num_threads)
    return Contest(
        kernel=lambda: kernel(*arguments),
        reference=lambda: reference.paged_attention(*arguments),
    )


KERNELS: Mapping[str, Callable[[Setting], Contest]] = {"attention": attention}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds of a call: the median, and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """`ratio`: how many times as long the reference takes, by the medians."""

    kernel: str
    shape: str
    dtype: str
    threads: int
    kernel_us: Times
    reference_us: Times
    ratio: float


def measure(
    spec: ModelSpec,
    *,
    kernels: Sequence[str],
    dtypes: Sequence[str],
    threads: Sequence[int],
    rounds: int,
    shapes: Sequence[Shape] = SHAPES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[KernelRow]:
    """One row for each kernel, number of threads, dtype and shape; `rounds` samples of each side.

    Raises ConfigError where the kernels can't be compiled.
    """
    settings = [
        (name, Setting(spec=spec, shape=shape, dtype=getattr(torch, dtype), num_threads=num))
        for name in kernels
        for num in threads
        for dtype in dtypes
        for shape in shapes
    ]
    rows = []
    for name, setting in settings:
        on_progress(len(rows), len(settings))
        rows.append(_row(name, setting, rounds))
    return rows


@torch.inference_mode()
def _row(name: str, setting: Setting, rounds: int) -> KernelRow:
    torch.manual_seed(0)
    torch.set_num_threads(setting.num_threads)
    try:
        contest = KERNELS[name](setting)
    except BuildError as error:
        raise ConfigError(f"kernels = {name}: can't be compiled here: {error}") from None
    kernel, other = take_turns([contest.kernel, contest.reference], rounds)
    return KernelRow(
        kernel=name,
        shape=setting.shape.name,
        dtype=str(setting.dtype).removeprefix("torch."),
        threads=setting.num_threads,
        kernel_us=kernel,
        reference_us=other,
        ratio=other.median / kernel.median,
    )


def take_turns(calls: Sequence[Call], rounds: int) -> list[Times]:
    """The times of each call, of which every round takes one sample."""
    repeats = [_repeats(call) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, num, mine in zip(calls, repeats, samples, strict=True):
            mine.append(1e6 * _seconds(call, num) / num)
    return [times(each) for each in samples]


def times(samples_us: Sequence[float]) -> Times:
    """Of one sample or more."""
    if len(samples_us) == 1:
        return Times(median=samples_us[0], low=samples_us[0], high=samples_us[0])
    low, _, high = statistics.quantiles(samples_us, n=4, method="inclusive")
    return Times(median=statistics.median(samples_us), low=low, high=high)


def _repeats(call: Call) -> int:
    """The second call counts: the first one warms up."""
    _seconds(call, 1)
    return max(1, round(MIN_SAMPLE_S / max(1e-9, _seconds(call, 1))))


def _seconds(call: Call, num: int) -> float:
    start_s = time.perf_counter()
    for _ in range(num):
        call()
    return time.perf_counter() - start_s


def _context(spans: Sequence[tuple[int, int]]) -> AttentionContext:
    num_blocks = [-(-(start + length) // BLOCK_SIZE) for start, length in spans]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(0))
    blocks = list(order.split(num_blocks))
    slots = [
        (own[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[start : start + length]
        for own, (start, length) in zip(blocks, spans, strict=True)
    ]
    return AttentionContext(
        starts=[start for start, _ in spans],
        lengths=[length for _, length in spans],
        blocks=blocks,
        slots_T=torch.cat(slots),
    )
