"""The front's only way to the engine master: one stream a request.

Lives on the front's asyncio loop; the master lives on its own thread. Requests
go over as calls that only enqueue; tokens of a whole iteration come back in one
hand-off. Knows nothing of text and nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Protocol

from orca_dist.core import FinishReason, Output, Request
from orca_dist.engine.pace import QueuePace
from orca_dist.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    OrcaError,
    PipelineLost,
    QueueFull,
    RequestCancelled,
    RequestFailed,
    UnknownRequest,
)
from orca_dist.params import SamplingParams

MAX_LOGITS_BYTES = 512 * 2**20
MAX_PRIORITY = 100
MAX_JOINED_TOKENS = 1024  # in one output: what the front detokenises at a stretch


class Master(Protocol):
    """What the front may say to the engine master; every call returns at once."""

    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    def finish(self, request_id: int, num_tokens: int) -> None: ...


class RequestStream:
    """The outputs of one request, in order. Iterate it, and `close()` it in a `finally`."""

    def __init__(
        self,
        key: int,
        caller: str,
        request_id: str,
        num_prompt_tokens: int,
        streams: EngineStreams,
    ) -> None:
        self.key = key
        self.caller = caller
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0  # generated and handed out so far
        self.cached_tokens = 0  # of the prompt, whose KV was there already
        self.reason: FinishReason | None = None
        self._streams = streams
        self._outputs: deque[Output | OrcaError] = deque()
        self._tail: Output | None = None  # the last of them, if it is several in one
        self._arrived = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        """What has come since the last; raises the error that ended the request."""
        while not self._outputs:
            if self.reason is not None:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        item = self._outputs.popleft()
        if isinstance(item, OrcaError):
            self.reason = FinishReason.ERROR
            raise item
        self.num_tokens += len(item.tokens)
        self.cached_tokens = max(self.cached_tokens, item.cached_tokens)
        self.reason = item.reason
        return item

    def finish(self, num_tokens: int) -> None:
        """End the request after `num_tokens` generated ones (a stop string was met).

        What has come since is dropped and not counted.
        """
        self._streams.finish(self, num_tokens)
        if self.reason is None:
            self.num_tokens, self.reason = num_tokens, FinishReason.STOP
            self._outputs.clear()
            self._arrived.set()

    def close(self) -> None:
        """Give the request back if it hasn't ended. Any number of times."""
        self._streams.close(self)

    def put(self, item: Output | OrcaError) -> None:
        """What a reader has not read yet is joined: if it is behind, it gets longer parts."""
        last = self._outputs[-1] if self._outputs else None
        if isinstance(item, Output) and isinstance(last, Output) and _can_join(last, item):
            self._join(last, item)
        else:
            self._outputs.append(item)
        self._arrived.set()

    def _join(self, last: Output, item: Output) -> None:
        if last is not self._tail:
            last = self._tail = self._outputs[-1] = replace(last, tokens=list(last.tokens))
        assert isinstance(last.tokens, list), "ours, and of no one else"
        last.tokens += item.tokens
        last.cached_tokens = max(last.cached_tokens, item.cached_tokens)
        last.reason = item.reason


class EngineStreams:
    """Opens streams and deals out what the master hands over. One loop only."""

    def __init__(
        self,
        *,
        master: Master,
        vocab_size: int,
        max_model_len: int,
        kv_tokens: int,
        eos_token_ids: frozenset[int],
        max_queue: int,
        max_queue_tokens: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_len = min(max_model_len, kv_tokens)
        self._limit = "max_model_len" if max_model_len <= kv_tokens else "kv_tokens"
        self.eos_token_ids = eos_token_ids
        self._max_queue = max_queue
        self._max_queue_tokens = max_queue_tokens
        self._master = master
        self._keys = itertools.count(1)
        self._live: dict[int, RequestStream] = {}
        self._names: dict[tuple[str, str], int] = {}  # by caller and request_id
        self._waiting: dict[int, int] = {}  # prompt tokens of those without any output
        self._waiting_tokens = 0
        self._pace = QueuePace()
        self._lost: PipelineLost | None = None

    def open(
        self,
        *,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str = "",
        caller: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> RequestStream:
        """Submit a request; raises the OrcaError that says why it can't be served.

        A `request_id` is one among the live requests of its `caller`; another's may have it too.

        A higher `priority` goes first, up to the ageing of the others. After `timeout_s` the
        request ends with DeadlineExceeded, wherever it is.
        """
        if self._lost:
            raise self._lost
        if request_id and (caller, request_id) in self._names:
            raise DuplicateRequest(f"request_id {request_id!r} is in use by a live request")
        request = self._request(prompt, params, priority, timeout_s)
        self._check_queue(len(prompt))
        name = request_id or self._name(caller, request.id)
        stream = RequestStream(request.id, caller, name, len(prompt), self)
        self._live[request.id] = stream
        self._names[caller, name] = request.id
        self._waiting[request.id] = len(prompt)
        self._waiting_tokens += len(prompt)
        self._master.submit(request)
        return stream

    @property
    def num_entries(self) -> int:
        """In all tables that have one for a request, or a token of one: 0 once all have left."""
        return len(self._live) + len(self._names) + len(self._waiting) + self._waiting_tokens

    def finish(self, stream: RequestStream, num_tokens: int) -> None:
        if stream.key in self._live:
            self._forget(stream)
            self._master.finish(stream.key, num_tokens)

    def close(self, stream: RequestStream) -> None:
        if stream.key in self._live:
            self._forget(stream)
            self._master.cancel(stream.key)
            stream.put(RequestCancelled(f"request {stream.request_id} was cancelled"))

    def abort(self, request_id: str, caller: str = "") -> None:
        """Take a live request of `caller` back; raises UnknownRequest where there is none."""
        key = self._names.get((caller, request_id))
        if key is None:
            raise UnknownRequest(f"request_id {request_id!r} is not in use by a live request")
        self.close(self._live[key])

    def deliver(self, outputs: Sequence[Output]) -> None:
        """All outputs of one iteration, on the front's loop."""
        for output in outputs:
            stream = self._live.get(output.id)
            if stream is None:
                continue
            self._leave_queue(output.id)
            if output.reason:
                self._forget(stream)
            if output.reason is FinishReason.ERROR:
                stream.put(RequestFailed(output.message))
            elif output.reason is FinishReason.DEADLINE:
                stream.put(DeadlineExceeded(output.message))
            else:
                stream.put(output)

    def lose(self, error: PipelineLost) -> None:
        """The pipeline is gone: every live request ends with this error, new ones too."""
        self._lost = error
        for stream in list(self._live.values()):
            self._forget(stream)
            stream.put(error)

    def _forget(self, stream: RequestStream) -> None:
        del self._live[stream.key]
        del self._names[stream.caller, stream.request_id]
        self._leave_queue(stream.key)

    def _leave_queue(self, key: int) -> None:
        if key in self._waiting:
            self._waiting_tokens -= self._waiting.pop(key)
            self._pace.left(time.monotonic())

    def _retry_after_s(self) -> float:
        return self._pace.room_in_s(len(self._waiting), time.monotonic())

    def _check_queue(self, prompt_len: int) -> None:
        """A prompt that finds the queue empty is taken however long, else it never would be."""
        if len(self._waiting) >= self._max_queue:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting already (max_queue = "
                f"{self._max_queue}); try again later",
                retry_after_s=self._retry_after_s(),
            )
        if self._waiting and self._waiting_tokens + prompt_len > self._max_queue_tokens:
            raise QueueFull(
                f"{self._waiting_tokens} prompt tokens are waiting already and {prompt_len} more "
                f"are too many (max_queue_tokens = {self._max_queue_tokens}); try again later",
                retry_after_s=self._retry_after_s(),
            )

    def _name(self, caller: str, key: int) -> str:
        """For a request without one; a client may have chosen r1, r2, ... for its own."""
        name = f"r{key}"
        while (caller, name) in self._names:
            name += "+"
        return name

    def _request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int,
        timeout_s: float | None,
    ) -> Request:
        params.check()
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest(
                "priority", f"{priority} is not in [{-MAX_PRIORITY}, {MAX_PRIORITY}]"
            )
        self._check_prompt(prompt)
        room = self.max_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.return_logits:
            self._check_logits(len(prompt) + max_tokens)
        seed = secrets.randbits(64)
        return Request(
            id=next(self._keys),
            prompt=tuple(map(int, prompt)),
            max_tokens=max_tokens,
            sampling=params.settled(seed),
            stop_ids=frozenset() if params.ignore_eos else self.eos_token_ids,
            priority=priority,
            deadline_s=None if timeout_s is None else time.monotonic() + timeout_s,
        )

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidRequest("prompt", "is empty; give at least one token")
        if len(prompt) >= self.max_len:
            raise InvalidRequest(
                "prompt",
                f"{len(prompt)} tokens leave no room for an answer: prompt and answer together "
                f"take at most {self.max_len} ({self._limit})",
            )
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise InvalidRequest("token_ids", f"{token!r} is not a whole number")
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    "token_ids", f"{token} is not in the vocabulary of {self.vocab_size} ids"
                )

    def _check_logits(self, num_positions: int) -> None:
        """Logits come back over the control plane, which must stay free for heartbeats."""
        num_bytes = num_positions * self.vocab_size * 4
        if num_bytes > MAX_LOGITS_BYTES:
            raise InvalidRequest(
                "return_logits",
                f"{num_positions} positions of {self.vocab_size} logits are "
                f"{num_bytes / 2**20:.0f} MiB, more than {MAX_LOGITS_BYTES / 2**20:.0f} MiB: "
                "take a shorter prompt",
            )


def _can_join(last: Output, item: Output) -> bool:
    """Logits are kept apart: they are large, and copying them each time would cost more."""
    return len(last.tokens) < MAX_JOINED_TOKENS and not (last.logits or item.logits)
