"""The benches' own arithmetic, and their command lines; what they measure is nobody's promise."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

import pytest

from orca_dist.bench.jobs import make_jobs
from orca_dist.bench.scheduler import measure
from orca_dist.cli.main import main
from orca_dist.core import PagedMemory, Request, Scheduler, SchedulerConfig
from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.workload import Arrivals, Workload, WorkloadRequest, make_workload
from tests.fixtures.checkpoints import loud_llama


def test_scheduler_rows_are_of_the_sizes_asked_for() -> None:
    rows = measure([(10, 4), (0, 1)], iterations=5)
    assert [(row.waiting, row.running) for row in rows] == [(10, 4), (0, 1)]
    assert all(0 < row.select_us < row.us_per_iteration for row in rows)


def test_a_waiting_request_takes_less_than_a_kilobyte_beside_its_tokens() -> None:
    scheduler = Scheduler(
        config=SchedulerConfig(inflight=1, max_batch_size=1, max_batch_tokens=16),
        memory=PagedMemory(num_blocks=100, block_size=16),
    )
    num, prompt = 5000, tuple(range(64))
    gc.collect()
    tracemalloc.start()
    try:
        for id in range(num):
            scheduler.submit(Request(id=id, prompt=prompt, max_tokens=8), float(id))
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / num <= 1024


def test_the_command_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench scheduler --waiting 3 --running 2 --iterations 4 --json"
    assert main(command.split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    (row,) = document["rows"]
    assert (row["waiting"], row["running"]) == (3, 2)
    assert row["us_per_iteration"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("scheduler --running 0", "running = 0: must be at least 1"),
        ("scheduler --waiting -1", "waiting = -1: must be at least 0"),
        ("scheduler --iterations 0", "iterations = 0: must be at least 1"),
        ("shedule", "shedule: no such command; did you mean scheduler?"),
        ("offline --requests 0", "num_requests = 0: must be at least 1"),
        ("offline --stages 0", "stages = 0: must be at least 1"),
        ("offline --workload nowhere.json", "nowhere.json can't be read"),
    ],
)
def test_bad_command_lines(
    arguments: str,
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("orca_dist.llm.resolve_model", lambda _: loud_llama(tmp_path / "model"))
    assert main(["bench", *arguments.split()]) == 2
    assert message in capfd.readouterr().err


def test_prompts_that_are_lengths_become_random_tokens() -> None:
    lengths = Lengths(low=3, high=9)
    workload = make_workload(
        num_requests=5, prompt_lens=lengths, output_lens=lengths, arrivals=Arrivals(), seed=1
    )
    jobs = make_jobs(workload, seed=1, ids=range(10, 20))
    assert jobs == make_jobs(workload, seed=1, ids=range(10, 20))
    assert [len(job.prompt) for job in jobs] == [request.prompt for request in workload.requests]
    assert {token for job in jobs for token in job.prompt} <= set(range(10, 20))
    text = Workload(requests=(WorkloadRequest(id=7, prompt="hello", out=1),))
    with pytest.raises(ConfigError, match="request 7 of the workload: its prompt is a text"):
        make_jobs(text, seed=1, ids=range(10))
