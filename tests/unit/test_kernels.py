"""The kernels of the flat batch, each way: against plain formulas, and bit for bit in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orca_kernels import Activation, Linear
from orca_kernels.cpu.linear import CpuLinear, shortened
from orca_kernels.cpu.rows import CpuRows
from orca_kernels.dispatch import TORCH, GateMul, MakeLinear, RmsNorm
from orca_kernels.linear import TorchLinear
from torch.nn.functional import gelu, linear, silu

from tests.fixtures.cpu_library import cpu_library

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
PACKED_DTYPES = DTYPES if torch.ops.mkldnn._is_mkldnn_bf16_supported() else DTYPES[:1]
ROW_COUNTS = [*range(1, 71), 300]

RowWise = Callable[[torch.Tensor], torch.Tensor]
KINDS = ["torch", "cpu"]
OF_TORCH: Mapping[Activation, RowWise] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
}


def make_linear(kind: str, num_threads: int = 1) -> MakeLinear:
    """As a stage with that many threads has it."""
    if kind == "torch":
        return TorchLinear
    library = cpu_library()
    return lambda weight_FK, bias_F=None: CpuLinear(library, num_threads, weight_FK, bias_F)


def rows_of(kind: str, num_threads: int = 1) -> tuple[RmsNorm, GateMul]:
    if kind == "torch":
        return TORCH.rms_norm, TORCH.gate_mul
    rows = CpuRows(cpu_library(), num_threads)
    return rows.rms_norm, rows.gate_mul


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_x_wt_plus_b(kind: str, dtype: torch.dtype, num_rows: int, biased: bool) -> None:
    weight_FK, bias_F = noise(50, 33, dtype=dtype), noise(50, dtype=dtype, seed=1)
    x_TK = noise(num_rows, 33, dtype=dtype, seed=2)
    layer = make_linear(kind)(weight_FK, bias_F if biased else None)
    wanted = linear(x_TK.double(), weight_FK.double(), bias_F.double() if biased else None)
    y_TF = layer(x_TK)
    assert y_TF.shape == (num_rows, 50)
    close(y_TF, wanted, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 320), (33, 50)])
def test_a_row_of_linear_has_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None],
    kind: str,
    dtype: torch.dtype,
    num_threads: int,
    num_inputs: int,
    num_outputs: int,
) -> None:
    set_threads(num_threads)
    weight_FK, bias_F = noise(num_outputs, num_inputs, dtype=dtype), noise(num_outputs, dtype=dtype)
    layer = make_linear(kind, num_threads)(weight_FK, bias_F)
    x_TK = noise(600, num_inputs, dtype=dtype, seed=1)
    y_TF = layer(x_TK)
    for num_rows in ROW_COUNTS:
        rows = slice(num_rows, 2 * num_rows)
        assert torch.equal(layer(x_TK[rows]), y_TF[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_single_row_of_linear_has_the_bits_it_has_among_others(
    set_threads: Callable[[int], None], kind: str, dtype: torch.dtype, num_threads: int
) -> None:
    """oneDNN has another kernel for one row; with 1536 inputs its rounding shows."""
    set_threads(num_threads)
    layer = make_linear(kind, num_threads)(noise(96, 1536, dtype=dtype))
    x_TK = noise(64, 1536, dtype=dtype, seed=1)
    assert torch.equal(torch.cat([layer(row) for row in x_TK.split(1)]), layer(x_TK))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_linear_has_the_same_bits_on_any_number_of_threads(
    set_threads: Callable[[int], None], kind: str, dtype: torch.dtype
) -> None:
    weight_FK = noise(192, 576, dtype=dtype)
    x_TK = noise(70, 576, dtype=dtype, seed=1)
    results = []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        results.append(make_linear(kind, num_threads)(weight_FK)(x_TK))
    assert all(torch.equal(result, results[0]) for result in results)


def test_weights_that_bfloat16_holds_are_kept_in_it_and_change_no_bit() -> None:
    weight_FK, x_TK = noise(70, 40).bfloat16().float(), noise(33, 40, seed=1)
    assert shortened(weight_FK).dtype is torch.bfloat16
    assert torch.equal(shortened(weight_FK).float(), weight_FK)
    nearly = weight_FK.clone()
    nearly[69, 39] += 1e-4
    assert shortened(nearly).dtype is torch.float32
    make = make_linear("cpu")
    for num_rows in (1, 33):
        short, long = make(weight_FK)(x_TK[:num_rows]), make(nearly)(x_TK[:num_rows])
        assert torch.equal(short[:, :69], long[:, :69])
        assert not torch.equal(short[:, 69], long[:, 69])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 90),
    num_inputs=st.integers(1, 300),
    num_outputs=st.integers(1, 300),
    num_threads=st.integers(1, 3),
    is_short=st.booleans(),
)
def test_linear_of_any_shape(
    num_rows: int, num_inputs: int, num_outputs: int, num_threads: int, is_short: bool
) -> None:
    weight_FK = noise(num_outputs, num_inputs)
    weight_FK = weight_FK.bfloat16().float() if is_short else weight_FK
    x_TK = noise(num_rows, num_inputs, seed=1)
    layer = CpuLinear(cpu_library(), num_threads, weight_FK)
    layer._num_threads = num_threads  # however few its weights are
    torch.testing.assert_close(layer(x_TK), x_TK @ weight_FK.T, atol=1e-4, rtol=1e-4)


def test_more_inputs_than_the_cache_holds_change_no_bit() -> None:
    """They are worked through in blocks of rows."""
    layer: Linear = make_linear("cpu")(noise(40, 9000))
    x_TK = noise(100, 9000, seed=1)
    y_TF = layer(x_TK)
    assert torch.equal(y_TF[90:], layer(x_TK[90:]))
    torch.testing.assert_close(y_TF, x_TK @ noise(40, 9000).T, atol=1e-2, rtol=1e-4)


# ---- rms_norm and gate_mul ---------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 37, 5])
def test_rms_norm_is_its_formula(kind: str, dtype: torch.dtype, size: int) -> None:
    rms_norm, _ = rows_of(kind)
    x_TH, weight_H = noise(7, size, dtype=dtype) * 3, noise(size, dtype=dtype, seed=1)
    for eps in (1e-6, 0.5):
        x = x_TH.double()
        wanted = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_H.double()
        close(rms_norm(x_TH, weight_H, eps), wanted, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm_rounds_before_or_after_its_weight(kind: str) -> None:
    rms_norm, _ = rows_of(kind)
    x_TH, weight_H = noise(64, 64, dtype=torch.bfloat16), noise(64, dtype=torch.bfloat16, seed=1)
    wide = rms_norm(x_TH.float(), weight_H.float(), 1e-6)
    late = rms_norm(x_TH, weight_H, 1e-6, rounds_late=True)
    assert torch.equal(late, wide.bfloat16())
    assert not torch.equal(late, rms_norm(x_TH, weight_H, 1e-6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds_late", [True, False])
def test_a_weight_and_one_is_summed_in_float32(kind: str, rounds_late: bool) -> None:
    """In bfloat16 1 + 0.003 would be 1."""
    rms_norm, _ = rows_of(kind)
    x_TH, weight_H = noise(8, 64, dtype=torch.bfloat16), torch.full((64,), 0.003).bfloat16()
    got = rms_norm(x_TH, weight_H, 1e-6, rounds_late=rounds_late, adds_one=True)
    normed = rms_norm(x_TH.float(), torch.ones(64), 1e-6)
    normed = normed if rounds_late else normed.bfloat16().float()
    assert torch.equal(got, (normed * (1.0 + weight_H.float())).bfloat16())
    assert not torch.equal(got, normed.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_head_that_is_normalised_has_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None], kind: str, dtype: torch.dtype, num_threads: int
) -> None:
    """As a strided part of a row, where queries and keys lie."""
    set_threads(num_threads)
    rms_norm, _ = rows_of(kind, num_threads)
    row_TF, weight_D = noise(1001, 7 * 32, dtype=dtype), noise(32, dtype=dtype, seed=1)

    def norm(x_TF: torch.Tensor) -> torch.Tensor:
        return rms_norm(x_TF[:, 32:192].unflatten(-1, (-1, 32)), weight_D, 1e-6)

    alone = torch.cat([norm(row) for row in row_TF.split(1)])
    for num_rows in (2, 301, 683, 1001):
        assert torch.equal(norm(row_TF[:num_rows]), alone[:num_rows]), f"{num_rows} rows"


@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm_of_tiny_values_is_held_up_by_eps(kind: str) -> None:
    rms_norm, _ = rows_of(kind)
    y_TH = rms_norm(torch.full((1, 8), 1e-6), torch.ones(8), 1e-6)
    torch.testing.assert_close(y_TH, torch.full((1, 8), 1e-3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [3, 100])
@pytest.mark.parametrize("activation", Activation)
def test_gate_mul_is_its_formula(
    kind: str, dtype: torch.dtype, spread: int, activation: Activation
) -> None:
    _, gate_mul = rows_of(kind)
    gate_up_TF = noise(7, 100, dtype=dtype) * spread
    gate, up = gate_up_TF[:, :50].double(), gate_up_TF[:, 50:].double()
    wanted = {
        Activation.SILU: gate / (1 + torch.exp(-gate)),
        Activation.GELU_TANH: gate / 2 * (1 + torch.tanh(0.79788456 * (gate + 0.044715 * gate**3))),
    }
    close(gate_mul(gate_up_TF, activation), wanted[activation] * up, dtype)


@pytest.mark.parametrize("activation", Activation)
def test_each_activation_is_close_to_torchs_everywhere(activation: Activation) -> None:
    """In relation to each value, of small gates and of such that are all but shut."""
    gate_F = torch.cat([torch.linspace(-9, 9, 4001), torch.logspace(-30, 4, 69)])
    gate_F = torch.cat([gate_F, -gate_F])
    _, gate_mul = rows_of("cpu")
    got = gate_mul(torch.stack([gate_F, torch.ones_like(gate_F)]).view(1, -1), activation)[0]
    wanted = OF_TORCH[activation](gate_F.double())
    torch.testing.assert_close(got.double(), wanted, atol=1e-13, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [96, 576, 37])
def test_rows_of_elementwise_layers_have_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None], kind: str, dtype: torch.dtype, num_threads: int, size: int
) -> None:
    """Batches large enough to be cut over threads, in the middle of rows too."""
    set_threads(num_threads)
    rms_norm, gate_mul = rows_of(kind, num_threads)
    weight_H = noise(size, dtype=dtype)
    norm: RowWise = lambda x_TH: rms_norm(x_TH, weight_H, 1e-5)  # noqa: E731
    gates: list[RowWise] = [partial(gate_mul, activation=activation) for activation in Activation]
    for layer, num_columns in ((norm, size), *((gate, 2 * size) for gate in gates)):
        x = noise(1001, num_columns, dtype=dtype, seed=1) * 3
        alone = torch.cat([layer(row) for row in x.split(1)])
        for num_rows in (2, 301, 683, 1001):
            assert torch.equal(layer(x[:num_rows]), alone[:num_rows]), f"{num_rows} rows"


def test_nan_stays_in_its_row() -> None:
    rms_norm, gate_mul = rows_of("cpu")
    x_TH = noise(3, 64)
    x_TH[1, 5] = torch.nan
    for result in (
        rms_norm(x_TH, noise(64), 1e-6),
        *(gate_mul(x_TH, activation) for activation in Activation),
        make_linear("cpu")(noise(40, 64))(x_TH),
    ):
        assert result[1].isnan().any()
        assert not result[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds_late", [True, False])
@pytest.mark.parametrize("adds_one", [True, False])
@pytest.mark.parametrize("size", [1, 8, 37, 64, 100, 576, 1536, 4096, 16384])
def test_rms_norm_rounds_as_torch_does(
    dtype: torch.dtype, rounds_late: bool, adds_one: bool, size: int
) -> None:
    """To the bit: what is compared with transformers differs from it in nothing here."""
    x_TH, weight_H = noise(20, size, dtype=dtype) * 3, noise(size, dtype=dtype, seed=1)
    ours, _ = rows_of("cpu")
    got, wanted = (
        norm(x_TH, weight_H, 1e-6, rounds_late=rounds_late, adds_one=adds_one)
        for norm in (ours, TORCH.rms_norm)
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [1, 37, 576, 4096])
def test_a_residual_and_its_norm_are_those_of_torch(
    dtype: torch.dtype, num_threads: int, size: int
) -> None:
    """Both to the bit, though one call makes them; what came in is as it was."""
    x_TH, y_TH, weight_H = (noise(n, size, dtype=dtype, seed=n) for n in (200, 200, 1))
    y_TH, before = y_TH.flip(0), x_TH.clone()
    rows = CpuRows(cpu_library(), num_threads)
    for by in ({}, {"rounds_late": True, "adds_one": True}):
        got = rows.add_rms_norm(x_TH, y_TH, weight_H[0], 1e-6, **by)
        wanted = TORCH.add_rms_norm(x_TH, y_TH, weight_H[0], 1e-6, **by)
        assert all(map(torch.equal, got, wanted))
    assert torch.equal(x_TH, before)
