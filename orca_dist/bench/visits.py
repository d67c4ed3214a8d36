"""What the clients of a soak do: wait for their answer, leave early, or ask for what can't be.

Same seed, same visits. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from orca_dist.params import MAX_STOPS, SamplingParams

MAX_PRIORITY = 100  # of a request, as the server has it
PATIENCES = (-3.0, -0.5)  # of clients that leave at a certain time: powers of ten of seconds
TEMPERATURES = (0.0, 1.0)


class Manner(StrEnum):
    """How a visit is meant to end."""

    STAY = "stay"
    LEAVE_AFTER_TOKENS = "leave after tokens"
    LEAVE_AFTER_TIME = "leave after time"  # waiting or running, as it comes
    ABORT = "abort"  # by another call, which names the request
    BAD = "bad"  # refused


LEAVING = (Manner.LEAVE_AFTER_TOKENS, Manner.LEAVE_AFTER_TIME, Manner.ABORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request. It leaves after `num_tokens` of its answer, or after `after_s`."""

    manner: Manner
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    num_tokens: int = 0
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Most tokens of prompts and answers, and what the server takes."""

    prompt_len: int
    out: int
    ids: range
    max_model_len: int


def make_visits(
    num: int, sizes: Sizes, *, cancel_share: float, bad_share: float, seed: int
) -> Iterator[Visit]:
    """`num` of them; prompts begin alike now and then, so that blocks are shared."""
    rng = random.Random(f"{seed} visits")
    for _ in range(num):
        visit = _good(rng, sizes)
        draw = rng.random()
        if draw < bad_share:
            yield _spoiled(rng, visit, sizes)
        elif draw < bad_share + cancel_share:
            yield _leaving(rng, visit)
        else:
            yield visit


def _good(rng: random.Random, sizes: Sizes) -> Visit:
    length, first = rng.randint(1, sizes.prompt_len), rng.choice(sizes.ids[:4])
    start = rng.choice((0, 0, rng.randrange(len(sizes.ids))))
    prompt = [sizes.ids[(start + i) % len(sizes.ids)] for i in range(length - 1)]
    params = SamplingParams(
        max_tokens=rng.randint(1, sizes.out),
        temperature=rng.choice(TEMPERATURES),
        ignore_eos=True,
    )
    return Visit(manner=Manner.STAY, prompt=(first, *prompt), params=params)


def _leaving(rng: random.Random, visit: Visit) -> Visit:
    return replace(
        visit,
        manner=rng.choice(LEAVING),
        num_tokens=rng.randint(1, visit.params.max_tokens or 1),
        after_s=10 ** rng.uniform(*PATIENCES),
    )


def _spoiled(rng: random.Random, visit: Visit, sizes: Sizes) -> Visit:
    """One thing about it is wrong."""
    params, bad = visit.params, replace(visit, manner=Manner.BAD)
    return rng.choice(
        [
            replace(bad, prompt=()),
            replace(bad, prompt=(sizes.ids.stop,)),
            replace(bad, prompt=(sizes.ids[0],) * (sizes.max_model_len + 1)),
            replace(bad, priority=MAX_PRIORITY + 1),
            replace(bad, params=replace(params, max_tokens=0)),
            replace(bad, params=replace(params, temperature=-1.0)),
            replace(bad, params=replace(params, top_p=0.0)),
            replace(bad, params=replace(params, stop=("x",) * (MAX_STOPS + 1))),
        ]
    )
