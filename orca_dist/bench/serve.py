"""Loads on a live server, one after the other, and what became of each.

Knows the server by its address alone. Everything that could not be answered in full is
refused before the first request goes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from orca_dist.bench.attempt import Attempt
from orca_dist.bench.jobs import Job, make_jobs, ordinary_ids
from orca_dist.bench.load import Load
from orca_dist.client import AsyncClient, ModelInfo
from orca_dist.errors import ConfigError
from orca_dist.sim.workload import Workload, WorkloadRequest, prompt_len

NUM_CONNECTIONS = 8  # many servers and proxies allow 100 streams on each
TIMEOUT_S = 30.0  # of the calls that prepare the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Most tokens of a request, prompt and answer, and the knob that says so."""

    name: str
    tokens: int


class ServeBench:
    """Runs workloads against one server; `runs` holds those that have begun."""

    def __init__(
        self,
        address: str,
        workloads: Sequence[Workload],
        *,
        seed: int,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.runs: list[Load] = []
        self._address = address
        self._workloads = workloads
        self._seed = seed
        self._on_progress = on_progress

    async def run(self) -> None:
        """Returns once every request of every workload has ended.

        Raises ConfigError for what this server can't answer, ServerUnavailable without one.
        """
        async with connected(self._address) as connections:
            client, *_ = connections
            model = await client.model_info(timeout_s=TIMEOUT_S)
            limit = await _limit(client)
            workloads = [await _without_texts(client, each) for each in self._workloads]
            for workload in workloads:
                _check(workload, model, limit)
            self._on_progress(0, self._num_requests)
            for index, workload in enumerate(workloads):
                await self._run(index, workload, model, connections)

    async def _run(
        self,
        index: int,
        workload: Workload,
        model: ModelInfo,
        connections: Sequence[AsyncClient],
    ) -> None:
        before = sum(len(run.attempts) for run in self.runs)
        load = Load(
            self._jobs(index, workload, model),
            connections,
            clients=workload.clients,
            on_end=lambda num: self._on_progress(before + num, self._num_requests),
        )
        self.runs.append(load)
        await load.run()

    def _jobs(self, index: int, workload: Workload, model: ModelInfo) -> list[Job]:
        """Each run has tokens of its own: the server may remember those of the one before."""
        seed = f"{self._seed} run {index}" if index else self._seed
        return make_jobs(workload, seed=seed, ids=ordinary_ids(model.vocab_size))

    @property
    def _num_requests(self) -> int:
        return sum(len(workload.requests) for workload in self._workloads)

    def results(self) -> list[list[Attempt]]:
        """The attempts of each run that has any."""
        return [run.attempts for run in self.runs if run.attempts]


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[list[AsyncClient]]:
    """Clients with a connection each, all of them open."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(address)) for _ in range(NUM_CONNECTIONS)
        ]
        await asyncio.gather(*(client.model_info(timeout_s=TIMEOUT_S) for client in clients))
        yield clients


async def _limit(client: AsyncClient) -> Limit:
    info = await client.info(timeout_s=TIMEOUT_S)
    if info.kv_tokens < info.max_model_len:
        return Limit(name="kv_tokens", tokens=info.kv_tokens)
    return Limit(name="max_model_len", tokens=info.max_model_len)


async def _without_texts(client: AsyncClient, workload: Workload) -> Workload:
    """With the server's own token ids in place of prompts that are texts."""
    return replace(
        workload, requests=tuple([await _tokenized(client, each) for each in workload.requests])
    )


async def _tokenized(client: AsyncClient, request: WorkloadRequest) -> WorkloadRequest:
    if not isinstance(request.prompt, str):
        return request
    return replace(request, prompt=await client.tokenize(request.prompt, timeout_s=TIMEOUT_S))


def _check(workload: Workload, model: ModelInfo, limit: Limit) -> None:
    for request in workload.requests:
        length = prompt_len(request.prompt)
        assert length is not None, "texts are tokenized by now"
        if length + request.out > limit.tokens:
            raise ConfigError(
                f"request {request.id} of the workload: prompt {length} and out {request.out} are "
                f"more than the server's {limit.name}, {limit.tokens} tokens; shorten it, or serve "
                f"with more"
            )
        if isinstance(request.prompt, tuple) and not _are_known(request.prompt, model):
            raise ConfigError(
                f"request {request.id} of the workload: its token ids are not all in the server's "
                f"vocabulary, 0 to {model.vocab_size - 1}"
            )


def _are_known(ids: Sequence[int], model: ModelInfo) -> bool:
    return min(ids) >= 0 and max(ids) < model.vocab_size
