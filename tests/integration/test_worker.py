"""Stages in one process against transformers and against themselves, bit for bit.

The model is loud: any mistake in weights, positions or KV shows in the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orca_dist.core import FinishReason, Request, Sampling, split_layers
from orca_dist.stage.worker import StageWorker
from orca_dist.transport.channel import LinkError
from orca_dist.transport.loopback import LoopbackChannel
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.thread_pipeline import (
    Schedule,
    ThreadPipeline,
    load_stages,
    mixed_plans,
    run_stage,
    stage_setup,
    thread_pipeline,
)

VOCAB = 320
HIDDEN = 64
NUM_LAYERS = 5
PROMPTS = [[5, 9, 17], [300], list(range(40, 77)), [7, 7, 7, 7, 7], list(range(100, 150))]
MAX_TOKENS = 12
POISON = 319  # a token whose embedding is NaN in the poisoned model
DTYPES = ["float32"]
if torch.ops.mkldnn._is_mkldnn_bf16_supported():
    DTYPES.append("bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    folder = loud_llama(tmp_path_factory.mktemp("poisoned"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=[1, 2, 3])
def pipeline(folder: Path, request: pytest.FixtureRequest) -> Iterator[ThreadPipeline]:
    with thread_pipeline(folder, request.param) as pipeline:
        yield pipeline


def requests(sampling: Sampling | None = None, *, first_id: int = 0) -> list[Request]:
    """One for each of PROMPTS."""
    sampling = sampling or Sampling(return_logits=True)
    return [
        Request(id=first_id + i, prompt=tuple(prompt), max_tokens=MAX_TOKENS, sampling=sampling)
        for i, prompt in enumerate(PROMPTS)
    ]


def staggered(sampling: Sampling | None = None, *, first_id: int) -> dict[int, list[Request]]:
    """They join while others decode; the shortest comes last."""
    a, b, c, d, e = requests(sampling, first_id=first_id)
    return {0: [c, a], 2: [e], 5: [d, b]}


# ---- against transformers ----------------------------------------------


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[tuple[list[int], np.ndarray]]:
    """Greedy tokens of each prompt, and the logits of all positions that lead to one."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [_truth(model, list(prompt)) for prompt in PROMPTS]


def _truth(model: Any, ids: list[int]) -> tuple[list[int], np.ndarray]:
    prompt_len = len(ids)
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            logits_LV = model(torch.tensor([ids])).logits[0]
            ids.append(int(logits_LV[-1].argmax()))
    return ids[prompt_len:], logits_LV.numpy()


def test_greedy_is_what_transformers_says(
    pipeline: ThreadPipeline, truth: list[tuple[list[int], np.ndarray]]
) -> None:
    answers = pipeline.run(staggered(first_id=100))
    for i, (tokens, logits_LV) in enumerate(truth):
        answer = answers[100 + i]
        assert answer.tokens == tokens
        assert answer.reason is FinishReason.LENGTH
        np.testing.assert_allclose(answer.logits(VOCAB), logits_LV, atol=1e-4, rtol=0)


# ---- the same bits -----------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_bits_alone_or_mixed_on_any_number_of_stages(
    folder: Path, dtype: str
) -> None:
    with thread_pipeline(folder, 1, dtype=dtype) as one:
        alone = [one.alone(request) for request in requests(first_id=0)]
    for num_stages in (1, 2, 3):
        with thread_pipeline(folder, num_stages, dtype=dtype) as pipeline:
            mixed = pipeline.run(staggered(first_id=100))
        assert max(len(plan.ids) for plan in pipeline.plans) >= 3, "requests met in a batch"
        for i, single in enumerate(alone):
            assert mixed[100 + i].tokens == single.tokens
            assert mixed[100 + i].logits_bytes == single.logits_bytes


def test_the_size_of_batches_changes_no_bit(folder: Path) -> None:
    runs = []
    for max_batch_size in (1, 2, 5):
        with thread_pipeline(
            folder, 2, schedule=Schedule(max_batch_size=max_batch_size)
        ) as pipeline:
            runs.append(pipeline.run(staggered(first_id=0)))
    for i in range(len(PROMPTS)):
        assert len({run[i].logits_bytes for run in runs}) == 1


def test_seeded_samples_are_the_same_alone_or_mixed(pipeline: ThreadPipeline, folder: Path) -> None:
    seeded = Sampling(temperature=1.0, seed=42)
    with thread_pipeline(folder, 1) as one:
        alone = [one.alone(request).tokens for request in requests(seeded, first_id=0)]
    mixed = pipeline.run(staggered(seeded, first_id=200))
    assert [mixed[200 + i].tokens for i in range(len(PROMPTS))] == alone
    other = pipeline.run(staggered(replace(seeded, seed=43), first_id=300))
    assert [other[300 + i].tokens for i in range(len(PROMPTS))] != alone


# ---- one request's fault -----------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2])
def test_nan_fails_its_own_request_alone(poisoned: Path, num_stages: int) -> None:
    """Neighbours keep their bits, and so does whoever gets the failed one's KV blocks."""
    good = requests(first_id=0)
    bad = [
        Request(id=50 + i, prompt=(5, POISON, 9), max_tokens=MAX_TOKENS, sampling=sampling)
        for i, sampling in enumerate([Sampling(), Sampling(temperature=1.0, seed=1)])
    ]
    with thread_pipeline(poisoned, num_stages) as pipeline:
        alone = {request.id: pipeline.alone(request) for request in good}
        joined = [replace(request, id=100 + request.id) for request in good]
        answers = pipeline.run({0: [joined[0], bad[0], *joined[1:4]], 1: [bad[1]], 2: joined[4:]})
    for request in bad:
        assert answers[request.id].reason is FinishReason.ERROR
        assert "not finite" in answers[request.id].message
        assert answers[request.id].tokens == []
    for request in good:
        assert answers[100 + request.id].logits_bytes == alone[request.id].logits_bytes


# ---- load, run and close -----------------------------------------------


def test_a_stage_loads_its_own_tensors_and_no_others(folder: Path) -> None:
    layers = split_layers(NUM_LAYERS, 3)
    loaded = [
        StageWorker(host="127.0.0.1").load(stage_setup(folder, stage, layers, "float32"))
        for stage in range(3)
    ]
    layer_bytes = 4 * (HIDDEN * (128 + HIDDEN + 3 * 96) + 2 * HIDDEN)
    table_bytes = 4 * VOCAB * HIDDEN
    assert [stage.weight_bytes for stage in loaded] == [
        2 * layer_bytes + table_bytes,
        2 * layer_bytes,
        layer_bytes + 4 * HIDDEN + table_bytes,
    ]
    assert [bool(stage.store_address) for stage in loaded] == [True, False, False]
    assert {stage.device for stage in loaded} == {"cpu"}


def test_only_the_last_stage_answers(folder: Path) -> None:
    first, _ = mixed_plans()
    *others, result = [run_stage(worker, first) for worker in load_stages(folder, 3)]
    assert others == [None, None]
    assert (result.seq, list(result.ids)) == (first.seq, first.ids)


def test_the_trace_has_a_row_a_plan(folder: Path) -> None:
    workers = load_stages(folder, 2)
    plans = mixed_plans()
    for plan in plans:
        for worker in workers:
            run_stage(worker, plan)
    for worker, sends in zip(workers, (True, False), strict=True):
        trace = worker.trace.drain()
        assert list(trace.seq) == [plan.seq for plan in plans]
        wanted = [plan.num_tokens * HIDDEN * 4 if sends else 0 for plan in plans]
        assert list(trace.bytes_sent) == wanted
        for times in zip(
            trace.input_ready_s,
            trace.compute_start_s,
            trace.compute_end_s,
            trace.sent_s,
            strict=True,
        ):
            assert list(times) == sorted(times)
        assert len(worker.trace.drain().seq) == 0
        assert worker.trace.progress.last_seq == plans[-1].seq


def test_a_broken_link_is_a_link_error(folder: Path) -> None:
    layers = split_layers(NUM_LAYERS, 2)
    worker = StageWorker(host="127.0.0.1")
    worker.load(stage_setup(folder, 1, layers, "float32"))
    link = LoopbackChannel()
    worker.begin(link, None, num_blocks=128)
    link.close()
    first, _ = mixed_plans()
    with pytest.raises(LinkError):
        run_stage(worker, first)
    worker.close()
    worker.close()
