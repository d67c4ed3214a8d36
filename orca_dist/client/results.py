"""What a server answers, as plain objects. Knows nothing of channels and calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orca_dist.core import FinishReason
from orca_dist.proto.v1 import generate_pb2 as pb

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request; `cached_tokens` of the prompt needed no computing."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer; `token_ids` are the generated ones."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of an answer. `finish_reason` and `usage` are set on the last one."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    usage: Usage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """Where a stage of the server's pipeline runs; `actor_id` is "" outside Ray."""

    index: int
    node: str
    pid: int
    actor_id: str
    device: str
    layers: range
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The server's model, its stages, and the limits in force, in tokens."""

    model: str
    stages: tuple[StageInfo, ...]
    epoch: int
    max_model_len: int
    kv_tokens: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the server's model takes; a prompt's ids are less than `vocab_size`."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


def completion(message: pb.GenerateResponse) -> Completion:
    return Completion(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=FINISH_REASONS[message.finish_reason],
        usage=_usage(message.usage),
    )


def chunk(message: pb.GenerateChunk) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=FINISH_REASONS.get(message.finish_reason),
        usage=_usage(message.usage) if message.HasField("usage") else None,
    )


def joined(chunks: Iterable[Chunk]) -> Completion:
    """The whole answer that `chunks` are all the parts of."""
    parts = list(chunks)
    last = parts[-1]
    assert last.finish_reason is not None, "the last chunk has a finish_reason"
    assert last.usage is not None, "the last chunk has a usage"
    return Completion(
        request_id=last.request_id,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )


def server_info(message: pb.ServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        model=message.model,
        stages=tuple(_stage(stage) for stage in message.stages),
        epoch=message.epoch,
        max_model_len=message.max_model_len,
        kv_tokens=message.kv_tokens,
        version=message.version,
    )


def model_info(message: pb.ModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
    )


def _stage(message: pb.StageInfo) -> StageInfo:
    return StageInfo(
        index=message.index,
        node=message.node,
        pid=message.pid,
        actor_id=message.actor_id,
        device=message.device,
        layers=range(message.first_layer, message.last_layer + 1),
        state=message.state,
    )
