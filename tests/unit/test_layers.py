"""What sees the whole flat batch: against plain formulas, and bit for bit in any batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.functional import linear

from orca_dist.models.layers import Linear, Rotary, rms_norm, rotate, scaled, silu_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
PACKED_DTYPES = DTYPES if torch.ops.mkldnn._is_mkldnn_bf16_supported() else DTYPES[:1]
ROW_COUNTS = [*range(1, 71), 300]

RowWise = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Within rounding of `dtype`, in relation to the largest value."""
    wanted = wanted.double()
    assert got.dtype == dtype
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error < TOLERANCE[dtype]


# ---- Linear ------------------------------------------------------------


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_x_wt_plus_b(dtype: torch.dtype, num_rows: int, biased: bool) -> None:
    weight_FK, bias_F = noise(50, 33, dtype=dtype), noise(50, dtype=dtype, seed=1)
    x_TK = noise(num_rows, 33, dtype=dtype, seed=2)
    layer = Linear(weight_FK, bias_F if biased else None)
    assert layer.packed
    wanted = linear(x_TK.double(), weight_FK.double(), bias_F.double() if biased else None)
    y_TF = layer(x_TK)
    assert y_TF.shape == (num_rows, 50)
    close(y_TF, wanted, dtype)


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 320), (33, 50)])
def test_a_row_of_linear_has_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None],
    dtype: torch.dtype,
    num_threads: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    set_threads(num_threads)
    layer = Linear(noise(num_outputs, num_inputs, dtype=dtype), noise(num_outputs, dtype=dtype))
    x_TK = noise(600, num_inputs, dtype=dtype, seed=1)
    y_TF = layer(x_TK)
    for num_rows in ROW_COUNTS:
        rows = slice(num_rows, 2 * num_rows)
        assert torch.equal(layer(x_TK[rows]), y_TF[rows])


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_single_row_of_linear_has_the_bits_it_has_among_others(
    set_threads: Callable[[int], None], dtype: torch.dtype, num_threads: int
) -> None:
    """oneDNN has another kernel for one row; with 1536 inputs its rounding shows."""
    set_threads(num_threads)
    layer, x_TK = Linear(noise(96, 1536, dtype=dtype)), noise(64, 1536, dtype=dtype, seed=1)
    assert torch.equal(torch.cat([layer(row) for row in x_TK.split(1)]), layer(x_TK))


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_linear_has_the_same_bits_on_any_number_of_threads(
    set_threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    layer = Linear(noise(192, 576, dtype=dtype))
    x_TK = noise(70, 576, dtype=dtype, seed=1)
    results = []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        results.append(layer(x_TK))
    assert all(torch.equal(result, results[0]) for result in results)


# ---- rms_norm and silu_mul ---------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_its_formula(dtype: torch.dtype) -> None:
    x_TH, weight_H = noise(7, 64, dtype=dtype) * 3, noise(64, dtype=dtype, seed=1)
    for eps in (1e-6, 0.5):
        x = x_TH.double()
        wanted = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_H.double()
        close(rms_norm(x_TH, weight_H, eps), wanted, dtype)


def test_rms_norm_rounds_before_or_after_its_weight() -> None:
    x_TH, weight_H = noise(64, 64, dtype=torch.bfloat16), noise(64, dtype=torch.bfloat16, seed=1)
    wide = rms_norm(x_TH.float(), weight_H.float(), 1e-6)
    late = rms_norm(x_TH, weight_H, 1e-6, rounds_late=True)
    assert torch.equal(late, wide.bfloat16())
    assert not torch.equal(late, rms_norm(x_TH, weight_H, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_head_that_is_normalised_has_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None], dtype: torch.dtype, num_threads: int
) -> None:
    """As a strided part of a row, where queries and keys lie."""
    set_threads(num_threads)
    row_TF, weight_D = noise(1001, 7 * 32, dtype=dtype), noise(32, dtype=dtype, seed=1)

    def norm(x_TF: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TF[:, 32:192].unflatten(-1, (-1, 32)), weight_D, 1e-6)

    alone = torch.cat([norm(row) for row in row_TF.split(1)])
    for num_rows in (2, 301, 683, 1001):
        assert torch.equal(norm(row_TF[:num_rows]), alone[:num_rows]), f"{num_rows} rows"


def test_scaled_by_one_is_the_tensor_itself() -> None:
    x_TH = noise(3, 4)
    assert scaled(x_TH, 1.0) is x_TH
    assert torch.equal(scaled(x_TH, 0.5), x_TH / 2)


def test_rms_norm_of_tiny_values_is_held_up_by_eps() -> None:
    y_TH = rms_norm(torch.full((1, 8), 1e-6), torch.ones(8), 1e-6)
    torch.testing.assert_close(y_TH, torch.full((1, 8), 1e-3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_its_formula(dtype: torch.dtype) -> None:
    gate_up_TF = noise(7, 100, dtype=dtype) * 3
    gate, up = gate_up_TF[:, :50].double(), gate_up_TF[:, 50:].double()
    close(silu_mul(gate_up_TF), gate / (1 + torch.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [96, 576, 37])
def test_rows_of_elementwise_layers_have_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None], dtype: torch.dtype, num_threads: int, size: int
) -> None:
    """Batches large enough to be cut over threads, in the middle of rows too."""
    set_threads(num_threads)
    weight_H = noise(size, dtype=dtype)
    norm: RowWise = lambda x_TH: rms_norm(x_TH, weight_H, 1e-5)  # noqa: E731
    for layer, num_columns in ((norm, size), (silu_mul, 2 * size)):
        x = noise(1001, num_columns, dtype=dtype, seed=1) * 3
        alone = torch.cat([layer(row) for row in x.split(1)])
        for num_rows in (2, 301, 683, 1001):
            assert torch.equal(layer(x[:num_rows]), alone[:num_rows]), f"{num_rows} rows"


# ---- Rotary ------------------------------------------------------------


def make_rotary(
    head_dim: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    inverse_I = 500.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    rotary = Rotary(inverse_I, max_len=64, scale=scale, dtype=dtype, device=torch.device("cpu"))
    return lambda x_TND, positions_T: rotate(x_TND, rotary(positions_T))


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
def test_a_row_of_rotary_has_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None], dtype: torch.dtype
) -> None:
    set_threads(2)
    rotary, x_TND = make_rotary(64, dtype), noise(600, 3, 64, dtype=dtype)
    positions_T = torch.arange(600) % 64
    alone = torch.cat([rotary(x_TND[i : i + 1], positions_T[i : i + 1]) for i in range(600)])
    for num_rows in (2, 33, 600):
        assert torch.equal(rotary(x_TND[:num_rows], positions_T[:num_rows]), alone[:num_rows])
