"""A load on a live server: requests go out when they are due, whatever has come back.

Open loop: arrivals never wait for answers, so that a server which falls behind is seen to.
With `clients` the loop is closed: so many are out at once. Writes down when each request
was due, went out, had each of its tokens, and how it ended; sums nothing up.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from orca_dist.bench.attempt import Attempt
from orca_dist.bench.jobs import Job
from orca_dist.client import AsyncClient
from orca_dist.errors import OrcaError
from orca_dist.params import SamplingParams

INCOMPLETE = "INCOMPLETE"  # an answer that ended well, but with other than `out` tokens

OnEnd = Callable[[int], None]  # how many have ended


class Load:
    """One run of jobs, in order of their times. `attempts` fills up in the order of sending."""

    def __init__(
        self,
        jobs: Sequence[Job],
        connections: Sequence[AsyncClient],
        *,
        clients: int | None = None,
        on_end: OnEnd = lambda num_ended: None,
    ) -> None:
        self.attempts: list[Attempt] = []
        self._jobs = jobs
        self._connections = itertools.cycle(connections)
        self._is_open = clients is None
        self._free = asyncio.Semaphore(clients or len(jobs))
        self._on_end = on_end
        self._start_s = 0.0
        self._num_ended = 0

    async def run(self) -> None:
        """Returns once every request has ended; cancelled, it takes back those that are out."""
        self._start_s = time.perf_counter()
        async with asyncio.TaskGroup() as calls:
            for job in self._jobs:
                attempt = await self._next(job)
                self.attempts.append(attempt)
                calls.create_task(self._send(job, attempt))

    async def _next(self, job: Job) -> Attempt:
        """Returns when the job is due and a client is free."""
        await self._free.acquire()
        due_s = job.at_s if self._is_open else max(job.at_s, self._now_s())
        await asyncio.sleep(max(0.0, due_s - self._now_s()))
        return Attempt(prompt_len=len(job.prompt), out=job.out, due_s=due_s, sent_s=self._now_s())

    async def _send(self, job: Job, attempt: Attempt) -> None:
        params = SamplingParams(max_tokens=job.out, ignore_eos=True)
        attempt.sent_s = self._now_s()
        try:
            async for chunk in next(self._connections).stream(job.prompt, params):
                attempt.token_s += [self._now_s()] * len(chunk.token_ids)
                attempt.cached_tokens = chunk.usage.cached_tokens if chunk.usage else 0
            attempt.error = "" if len(attempt.token_s) == job.out else INCOMPLETE
        except OrcaError as error:
            attempt.error = error.status
        attempt.ended_s = self._now_s()
        self._free.release()
        self._num_ended += 1
        self._on_end(self._num_ended)

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s
