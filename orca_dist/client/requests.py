"""From Python's words to the proto's.

Refuses what a message can't hold, naming the field; everything else is for the
server to judge, whose limits may be newer than this client's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import cast

from orca_dist.errors import InvalidRequest
from orca_dist.params import SamplingParams
from orca_dist.proto.v1 import generate_pb2 as pb

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
GREEDY = SamplingParams()


def generate_request(
    prompt: Prompt, params: SamplingParams, request_id: str, priority: int
) -> pb.GenerateRequest:
    """`prompt`: text, token ids, or chat messages ({"role": …, "content": …})."""
    request = _prompted(prompt)
    with _naming("request_id"):
        request.request_id = request_id
    with _naming("priority"):
        request.priority = priority
    request.sampling.CopyFrom(_sampling(params))
    return request


def tokenize_request(prompt: str | Sequence[Message]) -> pb.TokenizeRequest:
    """`prompt`: text or chat messages."""
    request = _prompted(prompt)
    if request.HasField("token_ids"):
        raise InvalidRequest("prompt", "give text or chat messages, not token ids")
    if request.HasField("chat"):
        return pb.TokenizeRequest(chat=request.chat)
    return pb.TokenizeRequest(text=request.text)


def abort_request(request_id: str) -> pb.AbortRequest:
    with _naming("request_id"):
        return pb.AbortRequest(request_id=request_id)


def _prompted(prompt: Prompt) -> pb.GenerateRequest:
    if isinstance(prompt, str):
        with _naming("text"):
            return pb.GenerateRequest(text=prompt)
    if isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt):
        with _naming("chat"):
            messages = [_message(message) for message in cast(Sequence[Message], prompt)]
            return pb.GenerateRequest(chat=pb.Chat(messages=messages))
    with _naming("token_ids"):
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=cast(Sequence[int], prompt)))


def _message(message: Message) -> pb.ChatMessage:
    unknown = set(message) - {"role", "content"}
    if unknown:
        raise ValueError(f"a message has the keys role and content, not {', '.join(unknown)}")
    return pb.ChatMessage(role=message["role"], content=message["content"])


def _sampling(params: SamplingParams) -> pb.SamplingParams:
    if params.return_logits:
        raise InvalidRequest("return_logits", "is not offered by servers; use LLM")
    message = pb.SamplingParams()
    for name, value in asdict(params).items():
        if value is not None and name != "return_logits":
            with _naming(name):
                message.MergeFrom(pb.SamplingParams(**{name: value}))
    return message


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """What protobuf can't hold, as an InvalidRequest that names the field."""
    try:
        yield
    except KeyError as error:
        raise InvalidRequest(field, f"a message has no {error}") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"can't be sent: {error}") from None
