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
        encode = self._text_job(request) if kind == "text" else self._chat_job(request)
        if request.ByteSize() < LARGE_PROMPT_BYTES:
            return encode()
        return await asyncio.to_thread(encode)

    def _text_job(self, request: pb.GenerateRequest) -> Callable[[], list[int]]:
        text = convert.text_prompt(request)
        return lambda: self._encoder.encode(text)

    def _chat_job(self, request: pb.GenerateRequest) -> Callable[[], list[int]]:
        messages = convert.chat_prompt(request)  # the template itself writes <s> and the like
        return lambda: self._encoder.encode(self._chat.render(messages), add_special_tokens=False)
