"""CPU kernels against what they replace, on shapes that a served model meets.

A kernel is one entry of KERNELS: it makes a call to time of a Setting and of the kernels to
use. Ours and torch's do the same work on the same inputs and take turns, so that a slow
moment of the machine meets both. That they agree is the tests' business.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from orca_kernels import AttentionContext, Kernels, kernels_for
from orca_kernels.dispatch import TORCH

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


def attention(setting: Setting, kernels: Kernels) -> Call:
    """One layer's, requests' blocks scattered over the cache."""
    q_TND, _, _ = _heads(setting)
    context, k_BSMD, v_BSMD = _cache(setting)
    scale = setting.spec.attention_scale
    return lambda: kernels.paged_attention(q_TND, k_BSMD, v_BSMD, context, scale)


def matmul(setting: Setting, kernels: Kernels) -> Call:
    """The largest of a layer, with weights that are exact in bfloat16, as most checkpoints' are."""
    spec, dtype = setting.spec, setting.dtype
    weight_FK = torch.randn(2 * spec.intermediate_size, spec.hidden_size).bfloat16().to(dtype)
    linear, x_TK = kernels.linear(weight_FK), _rows(setting, spec.hidden_size)
    return lambda: linear(x_TK)


def rms_norm(setting: Setting, kernels: Kernels) -> Call:
    """Of the hidden state."""
    spec = setting.spec
    x_TH, weight_H = (
        _rows(setting, spec.hidden_size),
        torch.ones(spec.hidden_size).to(setting.dtype),
    )
    late = spec.rounds_late
    return lambda: kernels.rms_norm(x_TH, weight_H, spec.rms_norm_eps, rounds_late=late)


def silu_mul(setting: Setting, kernels: Kernels) -> Call:
    """Of an MLP's inner rows."""
    gate_up_TF = _rows(setting, 2 * setting.spec.intermediate_size)
    return lambda: kernels.silu_mul(gate_up_TF)


def rotate_and_write(setting: Setting, kernels: Kernels) -> Call:
    """Rotary embedding and the cache's new keys and values."""
    heads = _heads(setting)
    context, k_BSMD, v_BSMD = _cache(setting)
    angles = torch.randn(setting.shape.num_rows, 1, setting.spec.head_dim)
    rotation = angles.cos().to(setting.dtype), angles.sin().to(setting.dtype)
    return lambda: kernels.rotate_and_write(*heads, rotation, k_BSMD, v_BSMD, context)


KERNELS: Mapping[str, Callable[[Setting, Kernels], Call]] = {
    "attention": attention,
    "matmul": matmul,
    "rms_norm": rms_norm,
    "silu_mul": silu_mul,
    "rotate_and_write": rotate_and_write,
}


def both(name: str, setting: Setting) -> tuple[Call, Call]:
    """Ours and torch's, each of its own copy of the same inputs.

    Raises ConfigError where ours can't be compiled.
    """
    ours = kernels_for(torch.device("cpu"), setting.dtype, setting.num_threads)
    if ours is TORCH:
        raise ConfigError(f"kernels = {name}: can't be compiled here, see the log's warning")
    return _made(name, setting, ours), _made(name, setting, TORCH)


def _made(name: str, setting: Setting, kernels: Kernels) -> Call:
    torch.manual_seed(0)
    return KERNELS[name](setting, kernels)


def _rows(setting: Setting, width: int) -> torch.Tensor:
    return torch.randn(setting.shape.num_rows, width).to(setting.dtype)


def _heads(setting: Setting) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, views of what one matmul gives, as in the decoder."""
    spec = setting.spec
    N, M, D = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q, k, v = _rows(setting, (N + 2 * M) * D).split([N * D, M * D, M * D], dim=-1)
    return q.unflatten(-1, (N, D)), k.unflatten(-1, (M, D)), v.unflatten(-1, (M, D))


def _cache(setting: Setting) -> tuple[AttentionContext, torch.Tensor, torch.Tensor]:
    context, spec = _context(setting.shape.spans), setting.spec
    cache = (len(context.flat_blocks), BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    k_BSMD, v_BSMD = (torch.randn(cache).to(setting.dtype) for _ in range(2))
    return context, k_BSMD, v_BSMD


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
    torch.set_num_threads(setting.num_threads)
    kernel, other = take_turns(both(name, setting), rounds)
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
