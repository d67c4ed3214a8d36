"""The engine as a Python object: prompts in, completions out, no server.

Owns a front of its own: an asyncio loop on a thread, with the same streams that
the server uses. Knows nothing of gRPC. Texts are encoded and decoded here.
"""

from __future__ import annotations

import asyncio
import operator
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from orca_dist.answers import Piece, pieces
from orca_dist.client.results import Usage
from orca_dist.config import DeviceKind, Dtype, EngineConfig, Launcher, LoadFormat
from orca_dist.core import FinishReason
from orca_dist.engine.engine import Engine
from orca_dist.engine.streams import EngineStreams, RequestStream
from orca_dist.errors import ConfigError, InvalidRequest, ModelError, PipelineLost
from orca_dist.params import SamplingParams
from orca_dist.text import Detokenizer, StopMatcher, Tokenizer
from orca_dist.weights.fetch import DEFAULT_MODEL, fetch_default_model
from orca_dist.weights.source import is_repo_id

GREEDY = SamplingParams()
DEFAULTS = EngineConfig(
    stages=2, device=DeviceKind.CPU, dtype=Dtype.FLOAT32, launcher=Launcher.LOCAL
)
CLOSED = "the LLM is closed"
Logits = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A whole answer.

    token_ids: the generated ids. logprobs: not computed yet, always None.
    logits: [prompt_len + len(token_ids) - 1, vocab_size], where
    SamplingParams.return_logits asked for them; row i is what follows token i.
    """

    text: str
    token_ids: list[int]
    logprobs: None
    finish_reason: FinishReason
    usage: Usage
    logits: Logits | None = None


class LLM:
    """Stages of one model, for as long as the object lives; close it, or use `with`."""

    def __init__(
        self,
        model: str | Path,
        stages: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        launcher: str | None = None,
        *,
        config: EngineConfig | None = None,
    ) -> None:
        """Starts the stages; raises the OrcaError that says why they can't.

        model: a model folder, an id of the Hub (org/name), or the default model's name.
        `config` holds every setting; the four arguments before it win over it. Without one: 2
        stages, "cpu", "float32", "local" (processes of this machine; "ray": actors).
        """
        settled = _settled(config or DEFAULTS, stages, device, dtype, launcher)
        settled.check()
        folder = resolve_model(model, settled)
        self._tokenizer = Tokenizer.load(folder)
        self._engine = Engine.start(folder, settled, num_token_ids=self._tokenizer.num_ids)
        self._loop = _LoopThread()
        self._streams = self._make_streams()
        self._engine.attach(
            deliver=self._loop.caller(self._streams.deliver),
            lose=self._loop.caller(self._streams.lose),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine beneath, for its info() and trace()."""
        return self._engine

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[Completion]:
        """The answers to `prompts`, in their order; each is a text or a list of token ids.

        `params`: one for all, or one for each. Raises the first OrcaError, and
        takes the other prompts back; PipelineLost once the object is closed.
        """
        several = _prompts(prompts)
        each = _params(params, len(several))
        encoded = [self._encoded(prompt) for prompt in several]
        return self._loop.run(self._generate(encoded, each))

    def score(self, token_ids: Sequence[int]) -> Logits:
        """Logits [len(token_ids), vocab_size] fp32 of every position; row i is what follows it."""
        params = SamplingParams(max_tokens=1, return_logits=True)
        (completion,) = self.generate([token_ids], params)
        assert completion.logits is not None, "asked for"
        return completion.logits

    def close(self) -> None:
        """End the stages; calls of other threads end with PipelineLost. Any number of times."""
        self._loop.refuse()
        self._loop.caller(self._streams.lose)(PipelineLost(CLOSED))
        self._engine.close()
        self._loop.close()

    async def _generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        calls = [
            asyncio.ensure_future(self._complete(prompt, each))
            for prompt, each in zip(prompts, params, strict=True)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _complete(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        stream = self._streams.open(prompt=prompt, params=params)
        stops = StopMatcher(params.stop, include_stop=params.include_stop)
        try:
            parts = [part async for part in pieces(stream, Detokenizer(self._tokenizer), stops)]
        finally:
            stream.close()
        return self._completion(stream, parts, params)

    def _completion(
        self, stream: RequestStream, parts: Sequence[Piece], params: SamplingParams
    ) -> Completion:
        prompt_len = stream.num_prompt_tokens
        ids = [token for part in parts for token in part.token_ids]
        reason = parts[-1].reason
        assert reason is not None, "a stream ends with its reason"
        return Completion(
            text="".join(part.text for part in parts),
            token_ids=ids,
            logprobs=None,
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=prompt_len,
                completion_tokens=len(ids),
                cached_tokens=stream.cached_tokens,
            ),
            logits=self._logits(parts, prompt_len + len(ids) - 1) if params.return_logits else None,
        )

    def _logits(self, parts: Sequence[Piece], num_rows: int) -> Logits:
        """Rows of the first `num_rows` positions, in order, as the stages sent them."""
        flat = np.frombuffer(b"".join(part.logits for part in parts), dtype="<f4")
        return flat.reshape(-1, self._engine.spec.vocab_size)[:num_rows].astype(np.float32)

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _make_streams(self) -> EngineStreams:
        spec = self._engine.spec
        return EngineStreams(
            master=self._engine,
            vocab_size=spec.vocab_size,
            max_model_len=self._engine.max_model_len,
            kv_tokens=self._engine.kv_tokens,
            eos_token_ids=frozenset(spec.eos_token_ids) | frozenset(self._tokenizer.eos_token_ids),
            max_queue=sys.maxsize,  # the caller's own list is the queue
            max_queue_tokens=sys.maxsize,
        )


def resolve_model(model: str | Path, config: EngineConfig = DEFAULTS) -> Path:
    """The folder that `model` means: its own, the default model's, or that of a Hub repository.

    Of a repository, at the config's `revision`, its small files are fetched: the weights are
    the stages' business. Raises ModelError saying what can't be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() or str(model) == DEFAULT_MODEL.name:
        _refuse_revision(model, config.revision)
        return folder.resolve() if folder.is_dir() else fetch_default_model()
    if folder.is_file() and folder.suffix == ".gguf":
        raise ModelError(
            f"{model} is a GGUF file: make a folder of it with "
            f"`orca-dist model convert {model} FOLDER`, and give that"
        )
    if is_repo_id(str(model)):
        from orca_dist.weights.hub import fetch_model_files  # brings in an HTTP client

        has_weights = config.load_format is not LoadFormat.DUMMY
        return fetch_model_files(str(model), config.revision, weights=has_weights)
    raise ModelError(
        f"{model} is not a folder: give a Hugging Face model folder, an id of the Hub (org/name), "
        f"or {DEFAULT_MODEL.name}"
    )


def _refuse_revision(model: str | Path, revision: str) -> None:
    if revision:
        raise ConfigError(
            f"revision = {revision}: is for models of the Hub (org/name); {model} is a folder"
        )


class _LoopThread:
    """An asyncio loop on a daemon thread. Work is either refused or comes to its end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._lock = threading.Lock()  # of _refuses: work handed over before it is set is awaited
        self._refuses = False
        self._closing = threading.Lock()
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; an interrupt here cancels it there.

        Raises PipelineLost once work is refused.
        """
        with self._lock:
            if self._refuses:
                work.close()
                raise PipelineLost(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def caller(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        """`callback` for use from other threads; does nothing once the loop is closed."""

        def call(argument: Any) -> None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, argument)

        return call

    def refuse(self) -> None:
        """From now on no work is taken."""
        with self._lock:
            self._refuses = True

    def close(self) -> None:
        """Returns when all work has ended, and the loop with it; refuses more."""
        self.refuse()
        with self._closing:
            if self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(_all_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _all_others() -> None:
    """Returns when no other task of the running loop is left."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _prompts(prompts: object) -> list[str | list[int]]:
    """What generate() was given, as a list; raises InvalidRequest where it is something else."""
    wanted = "give a text, or a list of texts and lists of token ids"
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise InvalidRequest("prompts", f"{type(prompts).__name__} given; {wanted}")
    return [_prompt(index, prompt) for index, prompt in enumerate(prompts)]


def _prompt(index: int, prompt: object) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Integral):
        raise InvalidRequest(
            "prompts", f"number {prompt} given; put the token ids of a prompt in a list: [[1, 2]]"
        )
    if not _is_list(prompt):
        kind = type(prompt).__name__
        raise InvalidRequest("prompts", f"{kind} given as prompt {index}; give text or token ids")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InvalidRequest("token_ids", f"prompt {index}: {error}") from None


def _params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    each: list[SamplingParams] = list(params) if _is_list(params) else [params]
    for item in each:
        if not isinstance(item, SamplingParams):
            kind = type(item).__name__
            raise InvalidRequest("params", f"{kind} given; give SamplingParams, or a list of them")
    if len(each) != num_prompts:
        raise InvalidRequest(
            "params", f"{len(each)} of them for {num_prompts} prompts; give one, or one each"
        )
    return each


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    """Whether it holds items in order; arrays and ranges do, bytes mean something else."""
    return isinstance(value, Iterable) and not isinstance(
        value, str | bytes | bytearray | Mapping | Set
    )


def _settled(
    config: EngineConfig,
    stages: int | None,
    device: str | None,
    dtype: str | None,
    launcher: str | None,
) -> EngineConfig:
    """`config` with what is given in its place; its own checks name a wrong word."""
    given = {"stages": stages, "device": device, "dtype": dtype, "launcher": launcher}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(config, **changes)  # type: ignore[arg-type]
