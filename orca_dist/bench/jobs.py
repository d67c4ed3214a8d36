"""What a bench sends: prompts as token ids, each with the length of its answer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from orca_dist.errors import ConfigError
from orca_dist.sim.workload import Workload, WorkloadRequest

FIRST_ORDINARY_ID = 256  # those before are often special, or single bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of the run: its prompt's ids, and how many tokens it gets."""

    prompt: tuple[int, ...]
    out: int
    at_s: float = 0.0


def ordinary_ids(vocab_size: int) -> range:
    """Ids to draw prompts from."""
    return range(min(FIRST_ORDINARY_ID, vocab_size - 1), vocab_size)


def make_jobs(workload: Workload, *, seed: int | str, ids: range) -> list[Job]:
    """Prompts that are only lengths become random tokens of `ids`, so that none begin alike.

    Raises ConfigError where a prompt is a text.
    """
    rng = random.Random(f"{seed} tokens")
    return [_job(request, rng, ids) for request in workload.requests]


def _job(request: WorkloadRequest, rng: random.Random, ids: range) -> Job:
    prompt = request.prompt
    if isinstance(prompt, str):
        raise ConfigError(
            f"request {request.id} of the workload: its prompt is a text; give token ids or "
            "a length"
        )
    if isinstance(prompt, int):
        prompt = tuple(rng.choices(ids, k=prompt))
    return Job(prompt=prompt, out=request.out, at_s=request.at_s)
