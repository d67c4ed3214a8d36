"""From a request's prompt to token ids: text, ids or a chat.

Large texts are tokenised on a thread, so that a prompt of megabytes delays
neither health checks nor the streams of others. Knows nothing of RPCs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.server import convert

LARGE_PROMPT_BYTES = 4096  # tokenises in about a millisecond


class TextEncoder(Protocol):
    """Text to ids; safe to call from any thread."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class ChatRenderer(Protocol):
    """Messages to the text that the model was trained to continue.

    Raises InvalidRequest for messages it can't take, MissingCapability for a model
    that has no chat template.
    """

    @property
    def available(self) -> bool: ...
    def render(self, messages: Sequence[Mapping[str, str]]) -> str: ...


class PromptReader:
    """Reads prompts with one model's tokenizer and chat template."""

    def __init__(self, encoder: TextEncoder, chat: ChatRenderer) -> None:
        self._encoder = encoder
        self._chat = chat

    async def read(self, request: pb.GenerateRequest) -> Sequence[int]:
        """The prompt's token ids; raises InvalidRequest naming the field at fault."""
        kind = convert.prompt_kind(request)
        if kind == "token_ids":
            return convert.token_prompt(request)
        if kind == "chat":
            return await _run(self._chat_job(request), request)
        return await _run(self._text_job(convert.text_prompt(request)), request)

    async def encode(self, request: pb.TokenizeRequest) -> Sequence[int]:
        """The ids of a text or a chat, as `read` gives them; a text may be blank here."""
        if convert.prompt_kind(request) == "chat":
            return await _run(self._chat_job(request), request)
        return await _run(self._text_job(request.text), request)

    def _text_job(self, text: str) -> Callable[[], list[int]]:
        return lambda: self._encoder.encode(text)

    def _chat_job(
        self, request: pb.GenerateRequest | pb.TokenizeRequest
    ) -> Callable[[], list[int]]:
        messages = convert.chat_prompt(request)  # the template itself writes <s> and the like
        return lambda: self._encoder.encode(self._chat.render(messages), add_special_tokens=False)


async def _run(
    job: Callable[[], list[int]], request: pb.GenerateRequest | pb.TokenizeRequest
) -> list[int]:
    if request.ByteSize() < LARGE_PROMPT_BYTES:
        return job()
    return await asyncio.to_thread(job)
