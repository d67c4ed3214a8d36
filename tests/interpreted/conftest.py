"""Tests of this folder run where TRITON_INTERPRET=1 was set before triton was imported.

tests/integration/test_triton_*.py start such processes for them. Elsewhere they aren't collected:
kernels are either interpreted or compiled in a whole process.
"""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _dot_of_bfloat16() -> None:
    """The interpreter keeps bfloat16 as whole numbers of 16 bits, and multiplies them as such.

    Widened, products are what tensor cores compute: exact, and summed in fp32.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def create_dot(
        self: InterpreterBuilder,
        a: TensorHandle,
        b: TensorHandle,
        d: TensorHandle,
        input_precision: object,
        max_num_imprecise_acc: object,
    ) -> TensorHandle:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    InterpreterBuilder.create_dot = create_dot
