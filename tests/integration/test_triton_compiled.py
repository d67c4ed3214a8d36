"""The Triton kernels compiled for GPUs that aren't here, within what a multiprocessor has."""

from __future__ import annotations

import pytest
import triton

from scripts import triton_table
from scripts.triton_table import MIXTURES, MODELS, Variant, broken_limits, usages


def check(variants: list[Variant]) -> None:
    """None spills, and each fits into a multiprocessor of its GPU.

    Other versions of the compiler may spill some bytes, to have more blocks at a time.
    """
    max_spilled_bytes = 0 if triton.__version__ == triton_table.VERSION else 16
    assert broken_limits(variants, usages(variants), max_spilled_bytes) == []


@pytest.mark.timeout(300)
def test_some_kernels_compile_within_limits() -> None:
    check(
        [
            *triton_table.attention_variants([128], ["bf16"], [90]),
            *triton_table.attention_variants([256], ["bf16"], [80], has_cap=True),
            *triton_table.merge_variants([128], [80]),
            *triton_table.row_variants([MODELS[1], MODELS[-1]], ["bf16"], [90]),
            *triton_table.sample_variants([90]),
            *triton_table.expert_variants([MIXTURES[1]], ["bf16"], [80]),
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_limits() -> None:
    check(triton_table.all_variants())


def test_sampling_fuses_no_multiply_with_an_add() -> None:
    """Its weights have to be those of other devices, bit for bit."""
    (variant,) = triton_table.sample_variants([90])
    ptx = triton_table.compiled(variant).asm["ptx"]
    assert "fma." not in ptx
    assert "mul.rn.f32" in ptx, "what ptxas leaves as it is"


def test_the_page_has_every_kernel_that_is_compiled() -> None:
    page = triton_table.PAGE.read_text(encoding="utf-8")
    names = {triton_table.row_name(variant) for variant in triton_table.all_variants()}
    assert {name for name in names if name not in page} == set()
