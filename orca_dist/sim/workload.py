"""What comes in, and when: requests with lengths and arrival times.

Made from distributions and a seed, or read from a file by sim.trace. Knows no
simulator: whoever sends requests to something can take them from here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import Lengths

MAX_REQUESTS = 100_000_000
MAX_RATE = 1e9
MAX_CV = 100.0

Prompt = tuple[int, ...] | str | int  # token ids, text, or only a length


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """`out` tokens are generated, no less and no more; `at_s` after the start."""

    id: int | str
    prompt: Prompt
    out: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order of arrival.

    With `clients`, so many are out at once and the next goes as soon as one has its answer,
    not before its at_s.
    """

    requests: tuple[WorkloadRequest, ...]
    clients: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When requests come: all at once, unless there is a `rate` in requests per second.

    Gaps are Gamma distributed with the coefficient of variation `cv`: 1 is Poisson, more
    comes in bursts, 0 is a steady beat. `clients` bounds how many are out at once.
    """

    rate: float | None = None
    cv: float = 1.0
    clients: int | None = None

    def check(self) -> None:
        """Raises ConfigError naming what is out of its range."""
        if self.rate is not None and not 0 < self.rate <= MAX_RATE:
            raise ConfigError(
                f"rate = {self.rate}: must be more than 0 and at most {MAX_RATE:.0f} requests "
                "per second; leave it out for all at once"
            )
        if not 0 <= self.cv <= MAX_CV:
            raise ConfigError(
                f"cv = {self.cv}: must be at least 0 (a steady beat; 1 is Poisson) and at most "
                f"{MAX_CV:.0f}"
            )
        if self.clients is not None and self.clients < 1:
            raise ConfigError(f"clients = {self.clients}: must be at least 1")

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Without an end."""
        now_s = 0.0
        while True:
            now_s += self._gap_s(rng)
            yield now_s

    def _gap_s(self, rng: random.Random) -> float:
        if self.rate is None:
            return 0.0
        if self.cv == 1:
            return rng.expovariate(self.rate)
        if self.cv == 0:
            return 1 / self.rate
        shape = 1 / self.cv**2
        return rng.gammavariate(shape, 1 / (self.rate * shape))


def make_workload(
    *,
    num_requests: int,
    prompt_lens: Lengths,
    output_lens: Lengths,
    arrivals: Arrivals,
    seed: int,
) -> Workload:
    """Same arguments, same workload; a longer one begins with the shorter, and another rate
    only stretches the arrivals."""
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise ConfigError(
            f"num_requests = {num_requests}: must be at least 1 and at most {MAX_REQUESTS}"
        )
    arrivals.check()
    prompt_len = prompt_lens.sampler(random.Random(f"{seed} prompts"))
    output_len = output_lens.sampler(random.Random(f"{seed} outputs"))
    times_s = arrivals.times_s(random.Random(f"{seed} arrivals"))
    requests = tuple(
        WorkloadRequest(id=index, prompt=prompt_len(index), out=output_len(index), at_s=at_s)
        for index, at_s in zip(range(num_requests), times_s, strict=False)
    )
    return Workload(requests=requests, clients=arrivals.clients)


def in_order(requests: list[WorkloadRequest], clients: int | None = None) -> Workload:
    """A workload of requests that may stand in any order."""
    return Workload(
        requests=tuple(sorted(requests, key=lambda request: request.at_s)), clients=clients
    )


def prompt_len(prompt: Prompt) -> int | None:
    """In tokens; None for a text, which only a tokenizer could count."""
    if isinstance(prompt, str):
        return None
    return prompt if isinstance(prompt, int) else len(prompt)


def is_time(value: object) -> bool:
    """A finite number of seconds, not before the start."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= float(value) < math.inf  # type: ignore[arg-type]
