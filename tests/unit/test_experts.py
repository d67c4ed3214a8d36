"""Mixtures of experts: routing, and each way to compute them, against formulas; and their bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from orca_kernels import Activation, Experts, Linear, route
from orca_kernels.cpu.experts import CpuExperts
from orca_kernels.dispatch import TORCH, TORCH_ON_CPU, Kernels, cpu_kernels
from orca_kernels.experts import Matrices
from orca_kernels.linear import TorchLinear
from torch.nn.functional import gelu, silu

from tests.unit.test_kernels import DTYPES, PACKED_DTYPES, close, noise

NUM_EXPERTS, HIDDEN, INTER, CHOSEN = 7, 48, 40, 3
KINDS: dict[str, Callable[[torch.dtype, int], Kernels]] = {
    "dense": lambda dtype, num_threads: TORCH,
    "torch": lambda dtype, num_threads: TORCH_ON_CPU,
    "cpu": cpu_kernels,
}
GROUPED = ["torch", "cpu"]


def matrices(dtype: torch.dtype = torch.float32) -> list[Matrices]:
    return [
        (
            noise(2 * INTER, HIDDEN, dtype=dtype, seed=2 * number),
            noise(HIDDEN, INTER, dtype=dtype, seed=2 * number + 1),
        )
        for number in range(NUM_EXPERTS)
    ]


def made(
    kind: str,
    dtype: torch.dtype,
    num_threads: int = 1,
    activation: Activation = Activation.SILU,
) -> Experts:
    kernels = KINDS[kind](dtype, num_threads)
    return kernels.experts(iter(matrices(dtype)), NUM_EXPERTS, activation)


def batch(
    num_rows: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts of each, and their weights."""
    scores_TE = noise(num_rows, NUM_EXPERTS, seed=98)
    return (
        noise(num_rows, HIDDEN, dtype=dtype, seed=99),
        *route(scores_TE, CHOSEN, normalised=True),
    )


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- routing -----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
def test_a_row_goes_to_its_likeliest_experts(dtype: torch.dtype, normalised: bool) -> None:
    scores_TE = noise(50, NUM_EXPERTS, dtype=dtype)
    expert_TK, weight_TK = route(scores_TE, CHOSEN, normalised=normalised)
    assert (expert_TK.dtype, weight_TK.dtype) == (torch.int64, torch.float32)
    for scores_E, expert_K, weight_K in zip(scores_TE.double(), expert_TK, weight_TK, strict=True):
        likely_E = scores_E.exp() / scores_E.exp().sum()
        assert likely_E[expert_K].min() >= likely_E.sort(descending=True).values[CHOSEN - 1]
        assert len(set(expert_K.tolist())) == CHOSEN
        wanted_K = likely_E[expert_K] / (likely_E[expert_K].sum() if normalised else 1.0)
        torch.testing.assert_close(weight_K.double(), wanted_K, atol=1e-6, rtol=1e-5)


def test_weights_are_rounded_to_the_type_of_the_scores_where_asked_for() -> None:
    scores_TE = noise(50, NUM_EXPERTS, dtype=torch.bfloat16)
    _, wide_TK = route(scores_TE, CHOSEN, normalised=False)
    _, rounded_TK = route(scores_TE, CHOSEN, normalised=False, rounded=True)
    assert rounded_TK.dtype is torch.float32
    assert torch.equal(rounded_TK, wide_TK.bfloat16().float())
    assert not torch.equal(rounded_TK, wide_TK)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (128, 8), (5, 4)])
def test_a_rows_route_has_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None], num_threads: int, num_experts: int, num_chosen: int
) -> None:
    """In bfloat16 there are ties as well."""
    set_threads(num_threads)
    scores_TE = noise(600, num_experts, dtype=torch.bfloat16)
    experts_TK, weights_TK = route(scores_TE, num_chosen, normalised=True)
    for num_rows in (1, 2, 3, 17, 64, 300):
        rows = slice(num_rows, 2 * num_rows)
        expert_TK, weight_TK = route(scores_TE[rows], num_chosen, normalised=True)
        assert torch.equal(expert_TK, experts_TK[rows])
        assert torch.equal(weight_TK, weights_TK[rows])


# ---- experts -----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_a_row_is_the_weighted_sum_of_its_experts(
    kind: str, dtype: torch.dtype, activation: Activation, num_rows: int
) -> None:
    x_TH, expert_TK, weight_TK = batch(num_rows, dtype)
    gate = silu if activation is Activation.SILU else partial(gelu, approximate="tanh")
    wanted_TH = torch.zeros(num_rows, HIDDEN, dtype=torch.double)
    for row, (expert_K, weight_K) in enumerate(zip(expert_TK, weight_TK, strict=True)):
        for expert, weight in zip(expert_K, weight_K, strict=True):
            gate_up_FH, down_HF = matrices(dtype)[expert]
            gated_F, up_F = (gate_up_FH.double() @ x_TH[row].double()).chunk(2)
            wanted_TH[row] += weight.double() * (down_HF.double() @ (gate(gated_F) * up_F))
    got_TH = made(kind, dtype, activation=activation)(x_TH, expert_TK, weight_TK)
    close(got_TH, wanted_TH, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_added_up_in_float32(kind: str) -> None:
    """Of bfloat16 too, to which 1 + 2^-8 is 1. Every expert here gives 1."""
    ones = (torch.tensor([[16.0], [1 / 16]]).bfloat16(), torch.ones(1, 1).bfloat16())
    experts = KINDS[kind](torch.bfloat16, 1).experts([ones] * 3, 3, Activation.SILU)
    weight_TK = torch.tensor([[1.0, 2**-8, 2**-8]] * 2)
    y_TH = experts(torch.ones(2, 1).bfloat16(), torch.tensor([[0, 1, 2], [2, 0, 1]]), weight_TK)
    assert y_TH.tolist() == [[1 + 2**-7]] * 2


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(
    set_threads: Callable[[int], None], kind: str, dtype: torch.dtype, num_threads: int
) -> None:
    """An expert has other rows, or none, and rows come in another order."""
    set_threads(num_threads)
    experts = made(kind, dtype, num_threads)
    x_TH, expert_TK, weight_TK = batch(200, dtype)
    y_TH = experts(x_TH, expert_TK, weight_TK)
    for num_rows in (1, 2, 3, 17, 64):
        rows = slice(num_rows, 2 * num_rows)
        assert torch.equal(experts(x_TH[rows], expert_TK[rows], weight_TK[rows]), y_TH[rows])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(experts(x_TH[order], expert_TK[order], weight_TK[order]), y_TH[order])


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_any_number_of_threads_gives_the_same_bits(
    set_threads: Callable[[int], None], kind: str, dtype: torch.dtype
) -> None:
    results = []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        results.append(made(kind, dtype, num_threads)(*batch(70, dtype)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_row_did_not_choose_does_not_touch_it(kind: str) -> None:
    """Neither another row's values nor an expert's, though they be NaN."""
    pairs = matrices()
    pairs[2][0].fill_(torch.nan)
    x_TH, expert_TK, weight_TK = batch(40)
    x_TH[3] = torch.nan
    experts = KINDS[kind](torch.float32, 1).experts(pairs, NUM_EXPERTS, Activation.SILU)
    is_nan_T = experts(x_TH, expert_TK, weight_TK).isnan().any(-1)
    wanted_T = (expert_TK == 2).any(-1)
    wanted_T[3] = True
    assert torch.equal(is_nan_T, wanted_T)


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_what_its_matrices_do(kind: str) -> None:
    pairs = [(gate_up.bfloat16().float(), down) for gate_up, down in matrices()]
    experts = KINDS[kind](torch.float32, 1).experts(pairs, NUM_EXPERTS, Activation.SILU)
    linear = KINDS[kind](torch.float32, 1).linear
    assert experts.nbytes == sum(linear(each).nbytes for pair in pairs for each in pair)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_asked_for_one_expert_at_a_time(kind: str) -> None:
    """None is kept as it came: room for all of them twice is not needed."""
    alive: list[int] = []

    def one_by_one() -> Iterator[Matrices]:
        for gate_up_FH, down_HF in matrices():
            counted = gate_up_FH.clone()
            alive.append(id(counted))
            weakref.finalize(counted, alive.remove, id(counted))
            assert len(alive) <= 2, "this one, and the one before it"
            yield counted, down_HF

    KINDS[kind](torch.float32, 1).experts(one_by_one(), NUM_EXPERTS, Activation.SILU)


def test_an_expert_computes_the_rows_that_chose_it_and_no_others() -> None:
    """In one product each; one that nobody chose is left alone."""
    calls: list[tuple[int, int]] = []

    class Counted(TorchLinear):
        def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
            calls.append((id(self), len(x_TK)))
            return super().__call__(x_TK)

    def linear(weight_FK: torch.Tensor, bias_F: torch.Tensor | None = None) -> Linear:
        return Counted(weight_FK, bias_F)

    gate_mul = TORCH.gate_mul
    experts = CpuExperts(linear, gate_mul, matrices(), NUM_EXPERTS, Activation.SILU)
    x_TH, expert_TK, weight_TK = batch(4)
    experts(x_TH, expert_TK, weight_TK)
    counts = [count for count in expert_TK.flatten().bincount().tolist() if count]
    assert [num_rows for _, num_rows in calls] == [count for count in counts for _ in range(2)]
    assert len({layer for layer, _ in calls}) == len(calls)
