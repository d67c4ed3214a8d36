"""FlashInfer's attention on a GPU, where it is installed, against the torch reference.

The first of each head size and type compiles FlashInfer's kernel, unless its cache has it.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from orca_kernels import kernels_for, reference
from orca_kernels.dispatch import Kernels, with_flash_infer
from orca_kernels.flash_infer import DTYPES, HEAD_DIMS

from tests.fixtures.kernel_cases import CPU, Mix, PagedCase, check_attention, close, mixes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs orca-dist[flashinfer]"),
]

CUDA = torch.device("cuda", 0)
MIXED = Mix(spans=((0, 33), (70, 1), (5, 9), (0, 1), (1100, 1), (600, 90)))


def made() -> Kernels:
    return with_flash_infer(kernels_for(CUDA, torch.bfloat16, 1))


@settings(max_examples=100)
@given(mix=mixes(1200, HEAD_DIMS).filter(lambda mix: mix.dtype in DTYPES))
def test_any_mix(mix: Mix) -> None:
    check_attention(mix, made().paged_attention, CUDA)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 80])
def test_a_mixed_batch(head_dim: int, dtype: torch.dtype) -> None:
    """What FlashInfer does not serve is among them."""
    check_attention(replace(MIXED, head_dim=head_dim, dtype=dtype), made().paged_attention, CUDA)


def test_batches_that_the_host_has_prepared_ahead() -> None:
    """Each has its own tables, though the device is behind."""
    attention = made().paged_attention
    mix = replace(MIXED, head_dim=128, dtype=torch.bfloat16)
    cases = [PagedCase(replace(mix, spans=((start, 1), (0, 70)) * 4), CUDA) for start in range(40)]
    cases[0].run(attention)
    busy = torch.randn(8192, 8192, device=CUDA)
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy
    got = [case.run(attention) for case in cases]
    for out_TND, case in zip(got, cases, strict=True):
        close(out_TND, case.truth())


def test_layers_of_two_kinds_in_turn() -> None:
    attention = made().paged_attention
    case = PagedCase(replace(MIXED, head_dim=64, dtype=torch.float16), CUDA)
    context, on_host = case.context(), case.context(CPU)
    for window in (None, 50, None, 50):
        got = attention(case.q, case.k, case.v, context, case.scale, window)
        q, k, v = (each.float().cpu() for each in (case.q, case.k, case.v))
        close(got, reference.paged_attention(q, k, v, on_host, case.scale, window))
