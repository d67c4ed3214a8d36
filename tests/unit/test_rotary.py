"""Rotation by position: its formula, and the C++ kernel that rotates and writes KV in one go."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from orca_kernels import AttentionContext, reference
from orca_kernels.cpu.attention import empty_kv
from orca_kernels.cpu.rows import CpuRows
from orca_kernels.reference import rotate, rotate_and_write

from orca_dist.models.layers import Rotary, rounded, scaled
from tests.fixtures.cpu_library import cpu_library
from tests.unit.test_kernels import DTYPES, close, noise

BLOCK_SIZE = 12


def make_rotary(
    head_dim: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    rotary = make_tables(head_dim, dtype, scale)
    return lambda x_TND, positions_T: rotate(x_TND, rotary(positions_T))


def make_tables(head_dim: int, dtype: torch.dtype, scale: float = 1.0) -> Rotary:
    inverse_I = 500.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return Rotary(inverse_I, max_len=64, scale=scale, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_pairs_of_half_a_head_apart(dtype: torch.dtype) -> None:
    x_TND, positions = noise(4, 3, 8, dtype=dtype), [0, 1, 17, 63]
    wanted = torch.empty(4, 3, 8, dtype=torch.double)
    for row, position in enumerate(positions):
        for i in range(4):
            angle = position * 500.0 ** (-2 * i / 8)
            a, b = x_TND[row, :, i].double(), x_TND[row, :, i + 4].double()
            wanted[row, :, i] = a * math.cos(angle) - b * math.sin(angle)
            wanted[row, :, i + 4] = b * math.cos(angle) + a * math.sin(angle)
    close(make_rotary(8, dtype)(x_TND, torch.tensor(positions)), wanted, dtype)


def test_rotary_scales_what_it_turns() -> None:
    x_TND, positions_T = noise(4, 3, 8), torch.tensor([0, 1, 17, 63])
    doubled = make_rotary(8, scale=2.0)(x_TND, positions_T)
    assert torch.equal(doubled, 2 * make_rotary(8)(x_TND, positions_T))


def test_rotary_of_fp32_tables_rounds_once() -> None:
    x_TND, positions_T = noise(4, 3, 8, dtype=torch.bfloat16), torch.tensor([0, 1, 17, 63])
    exact = make_rotary(8)(x_TND.float(), positions_T)
    assert torch.equal(make_rotary(8)(x_TND, positions_T), exact.bfloat16())


def test_rotary_makes_products_depend_on_distance_alone() -> None:
    rotary, q, k = make_rotary(16), noise(1, 1, 16), noise(1, 1, 16, seed=1)
    products = {
        (m, n): float((rotary(q, torch.tensor([m])) * rotary(k, torch.tensor([n]))).sum())
        for m, n in ((5, 0), (25, 20), (63, 58), (6, 0))
    }
    assert products[5, 0] == pytest.approx(products[25, 20], abs=1e-4)
    assert products[5, 0] == pytest.approx(products[63, 58], abs=1e-4)
    assert products[5, 0] != pytest.approx(products[6, 0], abs=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_rotary_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    rotary, x_TND = make_rotary(64, dtype), noise(600, 3, 64, dtype=dtype)
    positions_T = torch.arange(600) % 64
    alone = torch.cat([rotary(x_TND[i : i + 1], positions_T[i : i + 1]) for i in range(600)])
    for num_rows in (2, 33, 600):
        assert torch.equal(rotary(x_TND[:num_rows], positions_T[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_the_kernel_rotates_and_writes_as_the_reference(
    dtype: torch.dtype, table_dtype: torch.dtype, num_threads: int, is_rotated: bool
) -> None:
    """Queries, keys and values are parts of one row, as the fused matmul leaves them."""
    num_rows, N, M, D = 300, 6, 2, 32
    qkv_TF = noise(num_rows, (N + 2 * M) * D, dtype=dtype)
    parts = qkv_TF.split([N * D, M * D, M * D], dim=-1)
    q_TND, k_TMD, v_TMD = (part.unflatten(-1, (-1, D)) for part in parts)
    rotation = make_tables(D, table_dtype)(torch.arange(num_rows) % 64) if is_rotated else None
    slots_T = torch.randperm(num_rows + 20)[:num_rows]
    cache = (num_rows // BLOCK_SIZE + 2, BLOCK_SIZE, M, D, dtype, torch.device("cpu"))
    caches = [*reference.empty_kv(*cache), *empty_kv(*cache)]
    for room in caches:
        room.fill_(9.0)
    context = AttentionContext(starts=[], lengths=[], blocks=[], slots_T=slots_T)
    expected = rotate_and_write(q_TND, k_TMD, v_TMD, rotation, *caches[:2], context)
    rows = CpuRows(cpu_library(), num_threads)
    rows._num_threads = num_threads
    got = rows.rotate_and_write(q_TND, k_TMD, v_TMD, rotation, *caches[2:], context)
    close(got, expected, dtype)
    close(caches[2], caches[0], dtype)
    assert torch.equal(caches[3], caches[1])
    if dtype is torch.float32 or not is_rotated:  # bfloat16 is rounded once, not thrice
        assert torch.equal(got, expected)
        assert torch.equal(caches[2], caches[0])


def test_scaled_by_one_is_the_tensor_itself() -> None:
    x_TH = noise(3, 4)
    assert scaled(x_TH, 1.0) is x_TH
    assert torch.equal(scaled(x_TH, 0.5), x_TH / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Roots of hidden sizes; and 257 and 259, which lie between two numbers of bfloat16."""
    for factor in (
        *(math.sqrt(size) for size in range(1, 300)),
        257.0,
        259.0,
        0.1,
        1e-3,
        12345.678,
    ):
        assert rounded(factor, dtype) == float(torch.tensor(factor, dtype=dtype))
