"""Compiles the Triton kernels for GPUs that need not be here; docs/gpu.md says what they take.

Triton's own compiler and ptxas run on any machine: registers, spilled bytes and shared memory
are read from the finished binaries. How many query heads share a KV head is an argument of
the kernels, so one binary serves all such ratios. Needs triton; takes some minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- written by scripts/triton_table.py -->\n", "<!-- end -->\n"

CAPABILITIES = (80, 89, 90)
FP8_CAPABILITIES = (89, 90)  # before them there is no such type
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
BLOCK_SIZE = 16
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
CAPPED_DIMS = (128, 256)  # of the models whose scores are capped
FP8_TYPES = {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

MAX_SHARED_BYTES = 99 * 1024  # a block's on sm_89, the least of the three
REGISTERS = 65536  # of a multiprocessor
VERSION = "3.9.0"  # of Triton: the page's figures are its own, and sizes were chosen by them


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes that the kernels of rows are compiled for."""

    name: str
    hidden: int
    heads: tuple[int, int]
    head_dim: int
    intermediate: int
    is_gemma: bool = False  # GELU; norms round late, by the weight + 1


MODELS = (
    Model(name="SmolLM2-135M", hidden=576, heads=(9, 3), head_dim=64, intermediate=1536),
    Model(name="Llama-3.1-8B", hidden=4096, heads=(32, 8), head_dim=128, intermediate=14336),
    Model(name="Llama-3.1-70B", hidden=8192, heads=(64, 8), head_dim=128, intermediate=28672),
    Model(name="Llama-3.1-405B", hidden=16384, heads=(128, 8), head_dim=128, intermediate=53248),
    Model(
        name="Gemma-2-9B",
        hidden=3584,
        heads=(16, 8),
        head_dim=256,
        intermediate=14336,
        is_gemma=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes that the kernels of experts are compiled for."""

    name: str
    hidden: int
    width: int  # of one expert
    num_experts: int
    num_chosen: int


MIXTURES = (
    Mixture(name="Mixtral-8x7B", hidden=4096, width=14336, num_experts=8, num_chosen=2),
    Mixture(name="Qwen3-30B-A3B", hidden=2048, width=768, num_experts=128, num_chosen=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One binary: a kernel, the types of its arguments, its constants, and for which GPU."""

    kernel: str
    label: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    capability: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a binary takes: registers a thread, bytes a thread that spill, shared bytes a block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int

    def faults(self, max_spilled_bytes: int) -> list[str]:
        """Which limits it breaks."""
        limits = {
            f"spills {self.spilled_bytes} bytes a thread": self.spilled_bytes > max_spilled_bytes,
            f"{self.shared_bytes} bytes of shared memory, of {MAX_SHARED_BYTES}": (
                self.shared_bytes > MAX_SHARED_BYTES
            ),
            f"{self.registers} registers in {self.num_warps} warps, of {REGISTERS}": (
                self.registers * self.num_warps * 32 > REGISTERS
            ),
        }
        return [fault for fault, is_broken in limits.items() if is_broken]


# ---- what there is to compile ------------------------------------------


def attention_variants(
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = tuple(ITEMSIZES),
    capabilities: Iterable[int] = CAPABILITIES,
    *,
    has_cap: bool = False,
) -> list[Variant]:
    """Both kinds of launch: of decodes alone, and mixed where that has tiles of its own."""
    return [
        _attention(head_dim, dtype, dtype, has_wide, capability, has_cap)
        for head_dim in head_dims
        for dtype in dtypes
        for capability in capabilities
        for has_wide in _kinds(head_dim, dtype)
    ]


def _kinds(head_dim: int, dtype: str) -> tuple[bool, ...]:
    from orca_kernels.triton.attention import wide_rows
    from orca_kernels.triton.tiles import NARROW

    is_apart = wide_rows(head_dim=head_dim, itemsize=ITEMSIZES[dtype]) > NARROW
    return (False, True) if is_apart else (False,)


def fp8_variants(
    head_dims: Iterable[int] = (64, 128), capabilities: Iterable[int] = FP8_CAPABILITIES
) -> list[Variant]:
    """Queries of bf16 over KV of eight bits."""
    return [
        _attention(head_dim, "bf16", kv_type, has_wide, capability, False)
        for head_dim in head_dims
        for kv_type in FP8_TYPES
        for capability in capabilities
        for has_wide in (False, True)
    ]


def _attention(
    head_dim: int, dtype: str, kv_type: str, has_wide: bool, capability: int, has_cap: bool
) -> Variant:
    from orca_kernels.triton.attention import tile_constants

    types = {
        **_pointers(dtype, "q_ptr"),
        **_pointers(kv_type, "k_ptr", "v_ptr"),
        **_pointers(dtype, "out_ptr"),
        **_pointers("i64", "blocks_ptr"),
        **_pointers("i32", "tiles_ptr"),
        **_pointers("fp32", "peak_ptr", "total_ptr", "sum_ptr"),
        "scale": "fp32",
        "cap": "fp32",
        "window": "i32",
        "group": "i32",
    }
    constants = tile_constants(
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        itemsize=ITEMSIZES[dtype],
        has_wide=has_wide,
        has_cap=has_cap,
    )
    of_kv = "" if kv_type == dtype else f" over {kv_type}"
    kind = "mixed" if has_wide else "decodes" if True in _kinds(head_dim, dtype) else "all"
    label = f"{head_dim}, {dtype}{of_kv}, {kind}{', capped' if has_cap else ''}"
    return _variant("attend_tiles", label, types, constants, capability)


def merge_variants(
    head_dims: Iterable[int] = HEAD_DIMS, capabilities: Iterable[int] = CAPABILITIES
) -> list[Variant]:
    """Of bfloat16 answers."""
    from orca_kernels.triton.attention import merge_constants

    types = {
        **_pointers("bf16", "out_ptr"),
        **_pointers("i32", "merges_ptr"),
        **_pointers("fp32", "peak_ptr", "total_ptr", "sum_ptr"),
        "group": "i32",
    }
    return [
        _variant(
            "merge_chunks", f"{head_dim}", types, merge_constants(head_dim=head_dim), capability
        )
        for head_dim in head_dims
        for capability in capabilities
    ]


def row_variants(
    models: Iterable[Model] = MODELS,
    dtypes: Iterable[str] = ("bf16", "fp32"),
    capabilities: Iterable[int] = CAPABILITIES,
) -> list[Variant]:
    """Norm, gate and rotation, at the sizes of some models."""
    return [
        variant
        for model in models
        for dtype in dtypes
        for capability in capabilities
        for variant in _rows(model, dtype, capability)
    ]


def _rows(model: Model, dtype: str, capability: int) -> list[Variant]:
    from orca_kernels import Activation
    from orca_kernels.triton import rows

    N, M = model.heads
    label = f"{model.name}, {dtype}"
    norm = {
        **_pointers(dtype, "x_ptr", "added_ptr", "weight_ptr", "sum_ptr", "y_ptr"),
        "num_rows": "i32",
        "row_stride": "i32",
        "eps": "fp32",
    }
    rotation = {
        **_pointers(dtype, "q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr"),
        **_pointers("i64", "slots_ptr"),
        **_pointers(dtype, "out_ptr", "k_cache_ptr", "v_cache_ptr"),
        "q_stride": "i32",
        "k_stride": "i32",
        "v_stride": "i32",
    }
    turned = rows.rotation_constants(
        num_heads=N, num_kv_heads=M, head_dim=model.head_dim, is_rotated=True
    )
    normed = rows.norm_constants(
        size=model.hidden,
        parts=1,
        is_added=True,
        rounds_late=model.is_gemma,
        adds_one=model.is_gemma,
    )
    activation = Activation.GELU_TANH if model.is_gemma else Activation.SILU
    gated = rows.gate_constants(size=model.intermediate, activation=activation)
    return [
        _variant("norm_rows", label, norm, normed, capability),
        _variant("gate_rows", label, _pointers(dtype, "gate_up_ptr", "y_ptr"), gated, capability),
        _variant("rotate_rows", label, rotation, turned, capability),
    ]


def sample_variants(capabilities: Iterable[int] = CAPABILITIES) -> list[Variant]:
    """A whole piece of a row at a time: what any vocabulary of 2048 tokens or more has."""
    from orca_kernels.triton.sample import MAX_COLUMNS, sample_constants

    types = {
        **_pointers("fp32", "logits_ptr"),
        **_pointers("i64", "table_ptr", "tokens_ptr"),
        "row_stride": "i32",
        "num_ids": "i32",
    }
    constants = sample_constants(num_ids=MAX_COLUMNS)
    return [
        _variant("sample_rows", "any vocabulary", types, constants, capability)
        for capability in capabilities
    ]


def expert_variants(
    mixtures: Iterable[Mixture] = MIXTURES,
    dtypes: Iterable[str] = ("bf16", "fp32"),
    capabilities: Iterable[int] = CAPABILITIES,
) -> list[Variant]:
    """With few rows of an expert and with many, and the sum of a row's choices."""
    return [
        variant
        for mixture in mixtures
        for dtype in dtypes
        for capability in capabilities
        for variant in (
            *_experts(mixture, dtype, 1, capability),
            *_experts(mixture, dtype, 4096, capability),
            _sum_of_choices(mixture, dtype, capability),
        )
    ]


def _experts(mixture: Mixture, dtype: str, num_rows: int, capability: int) -> list[Variant]:
    from orca_kernels.triton import experts

    num_experts, itemsize = mixture.num_experts, ITEMSIZES[dtype]
    num_pairs = num_rows * mixture.num_chosen
    rows = experts.tile_rows(num_pairs=num_pairs, num_experts=num_experts, itemsize=itemsize)
    constants = {
        "HIDDEN": mixture.hidden,
        "WIDTH": mixture.width,
        **experts.tile_constants(num_experts=num_experts, rows=rows, itemsize=itemsize),
    }
    label = f"{mixture.name}, {dtype}, tiles of {rows}"
    gate_up = {
        **_pointers(dtype, "x_ptr"),
        **_pointers("i64", "order_ptr", "ends_ptr"),
        **_pointers(dtype, "gate_up_ptr", "gated_ptr"),
    }
    down = {
        **_pointers(dtype, "gated_ptr"),
        **_pointers("i64", "order_ptr", "ends_ptr"),
        **_pointers(dtype, "down_ptr", "y_ptr"),
    }
    gating = {"CHOICES": mixture.num_chosen, "IS_GELU": False, **constants}
    return [
        _variant("gate_up_tiles", label, gate_up, gating, capability),
        _variant("down_tiles", label, down, constants, capability),
    ]


def _sum_of_choices(mixture: Mixture, dtype: str, capability: int) -> Variant:
    from orca_kernels.triton.experts import sum_constants

    types = {
        **_pointers(dtype, "y_ptr"),
        **_pointers("fp32", "weight_ptr"),
        **_pointers(dtype, "out_ptr"),
    }
    constants = sum_constants(hidden=mixture.hidden, num_choices=mixture.num_chosen)
    return _variant("sum_choices", f"{mixture.name}, {dtype}", types, constants, capability)


def _pointers(element: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{element}")


def _variant(
    kernel: str,
    label: str,
    types: Mapping[str, str],
    constants: Mapping[str, int],
    capability: int,
) -> Variant:
    return Variant(
        kernel=kernel,
        label=label,
        types=tuple(types.items()),
        constants=tuple(constants.items()),
        capability=capability,
    )


# ---- compiling ---------------------------------------------------------


def usages(variants: list[Variant], num_processes: int = 2) -> list[Usage]:
    """What each takes, in order; compiled by so many processes of their own."""
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(usage, variants))


def usage(variant: Variant) -> Usage:
    """Of one variant, which is compiled for it."""
    import triton

    binary = compiled(variant)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    taken = _resources(tool, binary.asm["cubin"])
    return Usage(
        registers=taken["REG"],
        spilled_bytes=taken["STACK"] + taken["LOCAL"],
        shared_bytes=binary.metadata.shared,
        num_warps=binary.metadata.num_warps,
    )


def compiled(variant: Variant) -> CompiledKernel:
    """Triton's binary; pointers are taken to be aligned to 16 bytes, as torch's are."""
    import triton
    from orca_kernels.triton import attention, experts, rows, sample
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = {
        "attend_tiles": attention.attend_tiles,
        "merge_chunks": attention.merge_chunks,
        "norm_rows": rows.norm_rows,
        "gate_rows": rows.gate_rows,
        "rotate_rows": rows.rotate_rows,
        "sample_rows": sample.sample_rows,
        "gate_up_tiles": experts.gate_up_tiles,
        "down_tiles": experts.down_tiles,
        "sum_choices": experts.sum_choices,
    }
    constants = {key: value for key, value in variant.constants if key not in OPTIONS}
    options = {key: value for key, value in variant.constants if key in OPTIONS}
    signature = {**dict(variant.types), **dict.fromkeys(constants, "constexpr")}
    pointers = [at for at, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=kernels[variant.kernel],
        signature=signature,
        constexprs=constants,
        attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
    )
    target = GPUTarget("cuda", variant.capability, 32)
    return triton.compile(source, target=target, options=options)


def _resources(tool: Path, cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and others, as cuobjdump tells them of the one kernel in a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    (line,) = (line for line in told.splitlines() if "REG:" in line)
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)}


# ---- the page ----------------------------------------------------------


def broken_limits(
    variants: list[Variant], taken: list[Usage], max_spilled_bytes: int = 0
) -> list[str]:
    """Which variants break which limits."""
    return [
        f"{variant.kernel}, {variant.label}, sm_{variant.capability}: {fault}"
        for variant, usage in zip(variants, taken, strict=True)
        for fault in usage.faults(max_spilled_bytes)
    ]


def tables() -> str:
    """The part of docs/gpu.md between BEGIN and END; raises ValueError where a limit is broken."""
    variants = all_variants()
    taken = usages(variants)
    if faults := broken_limits(variants, taken):
        raise ValueError("\n".join(faults))
    rows: dict[str, dict[int, str]] = {}
    for variant, usage in zip(variants, taken, strict=True):
        row = rows.setdefault(row_name(variant), {})
        row[variant.capability] = f"{usage.registers} · {usage.shared_bytes / 1024:.0f}"
    return _head() + "".join(
        f"{name} {' | '.join(cells.get(capability, '') for capability in CAPABILITIES)} |\n"
        for name, cells in rows.items()
    )


def all_variants() -> list[Variant]:
    """What a stage may ever launch, at these sizes."""
    return [
        *attention_variants(),
        *attention_variants(CAPPED_DIMS, has_cap=True),
        *fp8_variants(),
        *merge_variants(),
        *row_variants(),
        *sample_variants(),
        *expert_variants(),
    ]


def row_name(variant: Variant) -> str:
    """How the row of the page begins."""
    num_warps = dict(variant.constants)["num_warps"]
    return f"| `{variant.kernel}` | {variant.label} | {num_warps} |"


def _head() -> str:
    names = " | ".join(f"sm_{capability}" for capability in CAPABILITIES)
    return f"| kernel | for | warps | {names} |\n|---|---|---|{'---|' * len(CAPABILITIES)}\n"


def page(written: str) -> str:
    """docs/gpu.md with `written` in its place."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return head + BEGIN + written + END + rest.split(END)[1]


def main() -> int:
    PAGE.write_text(page(tables()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
