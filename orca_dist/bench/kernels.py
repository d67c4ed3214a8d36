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
from itertools import cycle

import numpy as np
import torch
from orca_kernels import Activation, AttentionContext, Kernels
from orca_kernels.cpu.build import BuildError, load_library
from orca_kernels.cpu.linear import CpuLinear
from orca_kernels.dispatch import TORCH, MakeLinear, cpu_kernels
from orca_kernels.sample import sampling_table

from orca_dist.errors import ConfigError
from orca_dist.spec import ModelSpec

BLOCK_SIZE = 16
MIN_WEIGHTS, MAX_LAYERS = 40_000_000, 64  # 80 MB at two bytes: more than caches hold
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
    heads = (setting.shape.num_rows, spec.num_heads, spec.head_dim)
    q_TND = torch.randn(heads).to(setting.dtype)

    def call_of(kernels: Kernels) -> Call:
        cache = _noisy_cache(setting, kernels, len(context.flat_blocks))
        arguments = (q_TND, *cache, context, spec.attention_scale, None, spec.attention_softcap)
        return lambda: kernels.paged_attention(*arguments)

    return _contest(setting, call_of)


def matmuls(setting: Setting) -> Contest:
    """The four of a layer, from memory; bfloat16 holds their weights, as those of checkpoints."""
    library = load_library()

    def ours(weight_FK: torch.Tensor, bias_F: torch.Tensor | None = None) -> CpuLinear:
        return CpuLinear(library, setting.num_threads, weight_FK, bias_F)

    return Contest(kernel=_layers(setting, ours), reference=_layers(setting, TORCH.linear))


def rms_norm(setting: Setting) -> Contest:
    """Before attention."""
    spec = setting.spec
    x_TH = torch.randn(setting.shape.num_rows, spec.hidden_size).to(setting.dtype)
    weight_H = torch.randn(spec.hidden_size).to(setting.dtype)

    def call_of(kernels: Kernels) -> Call:
        return lambda: kernels.rms_norm(
            x_TH, weight_H, 1e-5, rounds_late=spec.rounds_late, adds_one=spec.norm_adds_one
        )

    return _contest(setting, call_of)


def gate_mul(setting: Setting) -> Contest:
    """The MLP's gate."""
    columns = 2 * setting.spec.intermediate_size
    gate_up_TF = torch.randn(setting.shape.num_rows, columns).to(setting.dtype)
    activation = Activation(setting.spec.activation)
    return _contest(setting, lambda kernels: lambda: kernels.gate_mul(gate_up_TF, activation))


def rotate_and_write(setting: Setting) -> Contest:
    """Rotation of queries and keys, and the write of keys and values."""
    spec, num_rows = setting.spec, setting.shape.num_rows
    N, M, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    qkv_TF = torch.randn(num_rows, (N + 2 * M) * D).to(setting.dtype)
    parts = qkv_TF.split([N * D, M * D, M * D], dim=-1)
    q_TND, k_TMD, v_TMD = (part.unflatten(-1, (-1, D)) for part in parts)
    cos, sin = (torch.randn(num_rows, 1, D).to(setting.dtype) for _ in range(2))
    context = AttentionContext(
        starts=[], lengths=[], blocks=[], slots_T=torch.randperm(num_rows + BLOCK_SIZE)[:num_rows]
    )

    def call_of(kernels: Kernels) -> Call:
        cache = _noisy_cache(setting, kernels, num_rows // BLOCK_SIZE + 2)
        arguments = (q_TND, k_TMD, v_TMD, (cos, sin), *cache, context)
        return lambda: kernels.rotate_and_write(*arguments)

    return _contest(setting, call_of)


def sample(setting: Setting) -> Contest:
    """A token for each request, greedy and with top-p in turn."""
    num = len(setting.shape.spans)
    logits_RV = 4 * torch.randn(num, setting.spec.vocab_size)
    table_RP = sampling_table(
        rows=range(num),
        temperatures=[row % 2 for row in range(num)],
        top_ks=[0] * num,
        top_ps=[0.9] * num,
        min_ps=[0.0] * num,
        numbers=np.linspace(0, 1, num, endpoint=False),
    )
    return _contest(setting, lambda kernels: lambda: kernels.sample(logits_RV, table_RP))


KERNELS: Mapping[str, Callable[[Setting], Contest]] = {
    "attention": attention,
    "matmuls": matmuls,
    "rms_norm": rms_norm,
    "gate_mul": gate_mul,
    "rotate_and_write": rotate_and_write,
    "sample": sample,
}


def _contest(setting: Setting, call_of: Callable[[Kernels], Call]) -> Contest:
    ours = cpu_kernels(setting.dtype, setting.num_threads)
    return Contest(kernel=call_of(ours), reference=call_of(TORCH))


def _noisy_cache(
    setting: Setting, kernels: Kernels, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's keys and values, the same for all kernels, as these keep them."""
    spec, cpu = setting.spec, torch.device("cpu")
    sizes = (num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    k_BSMD, v_BSMD = kernels.empty_kv(*sizes, setting.dtype, cpu)
    torch.manual_seed(0)
    return k_BSMD.copy_(torch.randn(sizes)), v_BSMD.copy_(torch.randn(sizes))


def _layers(setting: Setting, make: MakeLinear) -> Call:
    """A call runs one layer; layers take turns, so many that no cache holds them all."""
    spec = setting.spec
    hidden, inner, queries = (
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads * spec.head_dim,
    )
    both = queries + 2 * spec.num_kv_heads * spec.head_dim
    sizes = ((both, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
    num_layers = min(MAX_LAYERS, 1 + MIN_WEIGHTS // sum(F * K for F, K in sizes))
    torch.manual_seed(0)  # the same for both sides
    layers = cycle(
        [
            [make(torch.randn(size).bfloat16().to(setting.dtype)) for size in sizes]
            for _ in range(num_layers)
        ]
    )
    inputs = [torch.randn(setting.shape.num_rows, K).to(setting.dtype) for _, K in sizes]
    return lambda: [multiply(x) for multiply, x in zip(next(layers), inputs, strict=True)]


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

    Raises ConfigError where the kernels can't be compiled, or a model has none of their kind.
    """
    if spec.experts is not None and "matmuls" in kernels:
        others = ", ".join(name for name in KERNELS if name != "matmuls")
        raise ConfigError(f"kernels = matmuls: experts have none of one size; choose of {others}")
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
