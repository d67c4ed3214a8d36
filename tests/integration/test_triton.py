"""The Triton kernels without a GPU: interpreted against the reference, compiled within limits.

Interpreting is a property of a whole process, so those tests run in one of their own
(tests/interpreted). Compiling needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from scripts import triton_table
from scripts.triton_table import MODELS, Variant, broken_limits, usages

ROOT = Path(__file__).resolve().parents[2]

# ---- interpreted -------------------------------------------------------


def interpret(file: str, marked: str) -> None:
    """Runs tests/interpreted in the interpreter, and fails with what failed there."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marked, f"tests/interpreted/{file}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", ["test_attention.py", "test_rows.py", "test_graphs.py"])
def test_kernels_equal_the_reference_in_the_interpreter(file: str) -> None:
    interpret(file, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "file", ["test_attention.py", "test_rows.py", "test_stage.py", "test_graphs.py"]
)
def test_more_of_the_same_in_the_interpreter(file: str) -> None:
    interpret(file, "slow")


def test_nothing_is_interpreted_here() -> None:
    assert "TRITON_INTERPRET" not in os.environ


# ---- compiled ----------------------------------------------------------


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
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_limits() -> None:
    check(triton_table.all_variants())


def test_the_page_has_every_kernel_that_is_compiled() -> None:
    page = triton_table.PAGE.read_text(encoding="utf-8")
    names = {triton_table.row_name(variant) for variant in triton_table.all_variants()}
    assert {name for name in names if name not in page} == set()
