"""Selective batching (Orca §3, S2): one product a weight for the whole batch, attention apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from orca_kernels import AttentionContext, Kernels, Linear, kernels_for

from orca_dist.core import Plan
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import load_stages, mixed_plans, run_stage

HIDDEN, INTER, VOCAB = 64, 96, 320
QKV = (4 + 2 + 2) * 16
NUM_LAYERS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@dataclass(frozen=True, slots=True)
class Matmul:
    """One product with a weight: `weight` tells weights apart."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    weight: int


@dataclass(frozen=True, slots=True)
class LoggedLinear:
    """A matmul that notes each time it is done."""

    inner: Linear
    matmuls: list[Matmul]

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def keeps(self, weight_FK: torch.Tensor) -> bool:
        return self.inner.keeps(weight_FK)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        y_TF = self.inner(x_TK)
        self.matmuls.append(Matmul(*x_TK.shape, y_TF.shape[1], id(self)))
        return y_TF


@dataclass(slots=True)
class KernelLog:
    """Stands for a stage's kernels, and notes what each call is told."""

    inner: Kernels
    matmuls: list[Matmul] = field(default_factory=list)
    contexts: list[AttentionContext] = field(default_factory=list)

    def kernels(self) -> Kernels:
        return replace(self.inner, linear=self.linear, paged_attention=self.attend)

    def linear(self, weight_FK: torch.Tensor, bias_F: torch.Tensor | None = None) -> Linear:
        return LoggedLinear(self.inner.linear(weight_FK, bias_F), self.matmuls)

    def attend(
        self,
        q_TND: torch.Tensor,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        self.contexts.append(context)
        return self.inner.paged_attention(q_TND, k_BSMD, v_BSMD, context, scale, window, softcap)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> KernelLog:
    log = KernelLog(kernels_for(torch.device("cpu"), torch.float32, 1))
    monkeypatch.setattr(
        "orca_dist.stage.worker.kernels_for", lambda device, dtype, num_threads: log.kernels()
    )
    return log


def test_the_plans_are_mixed() -> None:
    first, second = mixed_plans()
    assert first.lengths == [3, 1, 9, 5, 2]
    assert sorted(second.lengths) == [1, 1, 1, 1, 1, 3, 7, 11]
    assert all(second.samples)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_weight_is_applied_once_to_the_flat_batch(
    folder: Path, log: KernelLog, num_stages: int
) -> None:
    """3 prefills and 5 decodes: 26 rows, of which 8 sample."""
    workers = load_stages(folder, num_stages)
    first, second = mixed_plans()
    for worker in workers:
        run_stage(worker, first)
    log.matmuls.clear()
    for worker in workers:
        run_stage(worker, second)
    assert max(Counter(matmul.weight for matmul in log.matmuls).values()) == 1
    shapes = Counter((m.num_rows, m.num_inputs, m.num_outputs) for m in log.matmuls)
    assert shapes == {
        (26, HIDDEN, QKV): NUM_LAYERS,  # q, k and v
        (26, HIDDEN, HIDDEN): NUM_LAYERS,  # o
        (26, HIDDEN, 2 * INTER): NUM_LAYERS,  # gate and up
        (26, INTER, HIDDEN): NUM_LAYERS,  # down
        (8, HIDDEN, VOCAB): 1,  # the head, on the rows that sample alone
    }


def test_attention_is_told_each_request_apart(folder: Path, log: KernelLog) -> None:
    (worker,) = load_stages(folder, 1)
    first, second = mixed_plans()
    run_stage(worker, first)
    log.contexts.clear()
    run_stage(worker, second)
    assert len(log.contexts) == NUM_LAYERS
    for context in log.contexts:
        assert context.starts == second.starts
        assert context.lengths == second.lengths
        blocks = [block for table in context.blocks for block in table.tolist()]
        assert len(blocks) == len(set(blocks)), "no request looks into another's blocks"


def test_without_a_sampling_row_the_head_is_not_applied(folder: Path, log: KernelLog) -> None:
    (worker,) = load_stages(folder, 1)
    first, _ = mixed_plans()
    plan = replace(first, samples=[False] * len(first.ids))
    result = run_stage(worker, plan)
    assert result is not None
    assert (list(result.ids), result.seq) == ([], plan.seq)
    assert len(log.matmuls) == 4 * NUM_LAYERS
    assert all(matmul.num_outputs != VOCAB for matmul in log.matmuls)


def test_a_plan_of_drops_alone_runs_nothing(folder: Path, log: KernelLog) -> None:
    workers = load_stages(folder, 2)
    first, _ = mixed_plans()
    for worker in workers:
        run_stage(worker, first)
    log.matmuls.clear()
    drops = Plan(seq=99, drops=list(first.ids))
    assert [run_stage(worker, drops) for worker in workers] == [None, None]
    assert log.matmuls == []
