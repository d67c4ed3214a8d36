"""Between the public proto's words and ours.

Refuses, field by field, what a request can't mean; the ranges of sampling
parameters are checked by `SamplingParams.check`, the prompt's length and ids by
`EngineStreams.open`. Knows nothing of RPCs, engines or tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from orca_dist import __version__
from orca_dist.answers import Piece
from orca_dist.core import FinishReason
from orca_dist.engine.streams import RequestStream
from orca_dist.errors import InvalidRequest
from orca_dist.params import SamplingParams, check_num_stops
from orca_dist.proto.v1 import generate_pb2 as pb
from orca_dist.server.ports import EngineInfo, StageStatus

PROMPT_KINDS = ("text", "token_ids", "chat")
MAX_REQUEST_ID_LEN = 256
MAX_CHAT_MESSAGES = 10_000
MAX_SEARCHED_BYTES = 65_536
M = TypeVar("M", bound=Message)
FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def parse(kind: type[M], data: bytes) -> M:
    """The message in `data`; raises InvalidRequest where it isn't one, or has unknown fields."""
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise InvalidRequest("request", f"is not a valid {name}: {error}") from None
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != num_bytes:
        raise _not_known(kind, data)
    return message


def _not_known(kind: type[Message], data: bytes) -> InvalidRequest:
    """What a newer client asks for and we don't know of is refused, never passed over.

    Not searched for in a large message: to look at each of millions of fields would hold up
    everybody for seconds.
    """
    small = len(data) <= MAX_SEARCHED_BYTES
    name = f"a field of {kind.DESCRIPTOR.full_name}"
    where = _unknown_field(kind.FromString(data)) if small else name
    return InvalidRequest(
        "request",
        f"{where} is not known to orca-dist {__version__}: leave it out, or update the server",
    )


def _unknown_field(message: Message) -> str:
    """Where the first one is; "" where there is none."""
    for field in UnknownFieldSet(message):
        return f"field {field.field_number} of {message.DESCRIPTOR.full_name}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                if found := _unknown_field(inner):
                    return found
    return ""


def request_id(request: pb.GenerateRequest | pb.AbortRequest) -> str:
    """The client's id for the request, "" where it leaves the choice to us."""
    if len(request.request_id) > MAX_REQUEST_ID_LEN:
        raise InvalidRequest(
            "request_id",
            f"has {len(request.request_id)} characters; at most {MAX_REQUEST_ID_LEN} are allowed",
        )
    return request.request_id


def prompt_kind(request: pb.GenerateRequest | pb.TokenizeRequest) -> str:
    """Which of text, token_ids and chat is set; raises InvalidRequest unless it is one."""
    known = [kind for kind in PROMPT_KINDS if kind in request.DESCRIPTOR.fields_by_name]
    kinds = [kind for kind in known if request.HasField(kind)]
    if len(kinds) != 1:
        choice = f"{', '.join(known[:-1])} and {known[-1]}"
        found = " and ".join(kinds) or "none"
        raise InvalidRequest("prompt", f"set exactly one of {choice}, not {found}")
    return kinds[0]


def text_prompt(request: pb.GenerateRequest) -> str:
    """A prompt's text; a blank one is refused, for it would be an accident."""
    if not request.text.strip():
        raise InvalidRequest("text", "is empty or blank; give at least one visible character")
    return request.text


def token_prompt(request: pb.GenerateRequest) -> Sequence[int]:
    """The ids as they are, not copied: there may be millions, of which none is wanted."""
    if not request.token_ids.ids:
        raise InvalidRequest("token_ids", "is empty; give at least one token id")
    return request.token_ids.ids


def chat_prompt(request: pb.GenerateRequest | pb.TokenizeRequest) -> list[dict[str, str]]:
    """The messages as a chat template wants them, and checks them."""
    if len(request.chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequest(
            "chat",
            f"has {len(request.chat.messages)} messages; at most {MAX_CHAT_MESSAGES} are allowed",
        )
    return [{"role": message.role, "content": message.content} for message in request.chat.messages]


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults; raises InvalidRequest naming a field out of its range."""
    check_num_stops(len(message.stop))  # before they are copied
    default = SamplingParams()
    params = SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default.max_tokens,
        temperature=message.temperature if message.HasField("temperature") else default.temperature,
        top_k=message.top_k if message.HasField("top_k") else default.top_k,
        top_p=message.top_p if message.HasField("top_p") else default.top_p,
        min_p=message.min_p if message.HasField("min_p") else default.min_p,
        seed=message.seed if message.HasField("seed") else default.seed,
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else default.ignore_eos,
        stop=tuple(message.stop),
        include_stop=message.include_stop,  # unset reads as the default
    )
    params.check()
    return params


def usage(stream: RequestStream, last: Piece) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=stream.num_prompt_tokens,
        completion_tokens=last.num_tokens,
        cached_tokens=stream.cached_tokens,
    )


def chunk(piece: Piece, stream: RequestStream) -> pb.GenerateChunk:
    """One message of a streamed answer; the last one carries finish_reason and usage."""
    message = pb.GenerateChunk(
        request_id=stream.request_id, text=piece.text, token_ids=piece.token_ids
    )
    if piece.reason:
        message.finish_reason = FINISH_REASONS[piece.reason]
        message.usage.CopyFrom(usage(stream, piece))
    return message


def response(pieces: Sequence[Piece], stream: RequestStream) -> pb.GenerateResponse:
    """A whole answer, from all of its pieces."""
    last = pieces[-1]
    assert last.reason is not None, "an answer ends with its reason"
    return pb.GenerateResponse(
        request_id=stream.request_id,
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        finish_reason=FINISH_REASONS[last.reason],
        usage=usage(stream, last),
    )


def tokenized(ids: Sequence[int]) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(token_ids=ids, count=len(ids))


def model_info(
    *, name: str, vocab_size: int, max_model_len: int, eos_token_ids: Iterable[int], chat: bool
) -> pb.ModelInfoResponse:
    """`chat`: whether there is a chat template."""
    return pb.ModelInfoResponse(
        name=name,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=sorted(eos_token_ids),
        has_chat_template=chat,
    )


def server_info(info: EngineInfo, *, model: str) -> pb.ServerInfoResponse:
    return pb.ServerInfoResponse(
        model=model,
        stages=[_stage(stage) for stage in info.stages],
        epoch=info.epoch,
        max_model_len=info.max_model_len,
        kv_tokens=info.kv_tokens,
        version=__version__,
    )


def _stage(stage: StageStatus) -> pb.StageInfo:
    return pb.StageInfo(
        index=stage.index,
        node=stage.node,
        pid=stage.pid,
        actor_id=stage.actor_id,
        device=stage.device,
        first_layer=stage.layers[0],
        last_layer=stage.layers[-1],
        state=stage.state,
    )
