"""Good and bad requests to one `orca-dist serve` of three real stages, that none may harm.

A script model of 64 tokens with a chat template of its own, one request in a batch, one
batch in flight, and room for four more in the queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import grpc
import pytest

from orca_dist import Client, SamplingParams
from orca_dist.client.results import Completion
from orca_dist.core import FinishReason
from orca_dist.errors import QueueFull
from orca_dist.proto.v1 import generate_pb2 as pb
from tests.fixtures.checkpoints import (
    BANG,
    BYTE_VOCAB_SIZE,
    EOS,
    HELLO,
    byte_ids,
    byte_tokenizer,
    letter,
    script_llama,
)
from tests.fixtures.serving import Serving, serving

MAX_LEN = 64
MAX_QUEUE = 4
SECOND_EOS = 70  # of generation_config.json alone
CALL = "/orca.v1.GenerateService/Generate"
FLAGS = {
    "--stages": "3",
    "--max-model-len": str(MAX_LEN),
    "--kv-tokens": str(16 * MAX_LEN),
    "--max-batch-size": "1",
    "--inflight": "1",
    "--max-queue": str(MAX_QUEUE),
}
TEMPLATE = """{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}
{% endif %}{{ m.content }}{% endfor %}"""
SMILE, MIDDLE, E_ACUTE = "\U0001f642", "\u4e2d", "\u00e9"
SPOKEN = [HELLO, *byte_ids(SMILE), BANG, *byte_ids(MIDDLE), *byte_ids(E_ACUTE), EOS]
ALPHABET = [letter(character) for character in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]


def _script() -> dict[int, int]:
    """A..Z in a circle, "a" is followed by SPOKEN, "b" by "c" and the second EOS, others by A."""
    script = dict.fromkeys(range(BYTE_VOCAB_SIZE), letter("A"))
    script |= dict(zip(ALPHABET, [*ALPHABET[1:], ALPHABET[0]], strict=True))
    script |= dict(zip([letter("a"), *SPOKEN], SPOKEN, strict=False))
    return script | {letter("b"): letter("c"), letter("c"): SECOND_EOS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("script")
    script_llama(folder, _script(), eos=EOS, generation_eos=[EOS, SECOND_EOS])
    byte_tokenizer(folder, chat_template=TEMPLATE)
    with serving(folder, *(word for flag in FLAGS.items() for word in flag)) as server:
        before = server.stage_pids()
        yield server
        assert server.stage_pids() == before


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def _letters(count: int, after: str = "A") -> str:
    """What the model says after `after`."""
    first = ord(after) - ord("A") + 1
    return "".join(chr(ord("A") + (first + i) % 26) for i in range(count))


# ---- text --------------------------------------------------------------


def test_characters_are_whole_in_every_chunk(client: Client) -> None:
    """A2, F32: each character in one chunk, none replaced or lost, however tokens are joined."""
    chunks = list(client.stream([letter("a")]))
    texts = [chunk.text for chunk in chunks]
    assert "".join(texts) == f"Hello{SMILE}!{MIDDLE}{E_ACUTE}"
    assert [token for chunk in chunks for token in chunk.token_ids] == SPOKEN
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert client.generate([letter("a")]).text == "".join(texts)


@pytest.mark.parametrize("stop", ["MN", "N", "LMNO"])
def test_nothing_of_a_stop_is_streamed(client: Client, stop: str) -> None:
    """F31: streamed and whole answers agree; include_stop adds exactly the stop."""
    params = SamplingParams(max_tokens=40, stop=(stop,))
    before = _letters(26).partition(stop)[0]
    streamed = "".join(chunk.text for chunk in client.stream([letter("A")], params))
    assert streamed == client.generate([letter("A")], params).text == before
    included = client.generate([letter("A")], replace(params, include_stop=True))
    assert included.text == before + stop


def test_each_config_s_eos_counts(client: Client) -> None:
    """F36: only generation_config.json knows of this one."""
    answer = client.generate([letter("b")])
    assert answer.token_ids == (letter("c"), SECOND_EOS)
    assert answer.finish_reason is FinishReason.STOP
    assert client.model_info().eos_token_ids == (EOS, SECOND_EOS)


# ---- limits ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bad:
    """What is sent, and what the INVALID_ARGUMENT must begin with."""

    request: bytes
    message: str


def _bad(message: str, prompt: object = "A", **sampling: object) -> Bad:
    request = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, pb.Chat):
        request.chat.CopyFrom(prompt)
    elif isinstance(prompt, list):
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return Bad(request.SerializeToString(), message)


def _chat(role: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content="A")])


BOTH = pb.GenerateRequest(text="A", token_ids=pb.TokenIds(ids=[5])).SerializeToString()
BAD = [
    _bad("prompt: 64 tokens leave no room for an answer: prompt and answer together take at most "
         "64", [5] * 64),
    _bad("prompt: 65 tokens leave no room", [5] * 65),
    _bad("prompt: 192 tokens leave no room", "A" * 191),
    _bad("token_ids: -1 is not in the vocabulary of 315 ids", [-1]),
    _bad("token_ids: 315 is not in the vocabulary of 315 ids", [5, 315]),
    _bad("token_ids: is empty", []),
    _bad("text: is empty or blank", ""),
    _bad("text: is empty or blank", " \n\t "),
    _bad("prompt: set exactly one of text, token_ids and chat, not none", None),
    Bad(BOTH, "prompt: set exactly one of text, token_ids and chat, not text and token_ids"),
    _bad("max_tokens: 0 is less than 1", max_tokens=0),
    _bad("max_tokens: -1 is less than 1", max_tokens=-1),
    _bad("temperature: -0.1 ", temperature=-0.1),
    _bad("temperature: nan ", temperature=math.nan),
    _bad("temperature: inf ", temperature=math.inf),
    _bad("top_p: 0.0 ", top_p=0.0),
    _bad("top_p: 1.01 ", top_p=1.01),
    _bad("top_k: -2 ", top_k=-2),
    _bad("min_p: 1.5 ", min_p=1.5),
    _bad("stop: 1000 ", stop=["x"] * 1000),
    _bad("stop: ", stop=[""]),
    _bad("chat: has no messages", pb.Chat()),
    _bad("chat: message 0 has the role ''", _chat("")),
    _bad("chat: message 0 has the role 'robot'", _chat("robot")),
    _bad("chat: the chat template refuses it: no tools", _chat("tool")),
    Bad(b"\x12\x02\xff\xfe", "request: is not a valid orca.v1.GenerateRequest"),  # not UTF-8
    Bad(b"\x2a\x02\x78\x05", "request: field 15 of orca.v1.SamplingParams is not known"),
]  # fmt: skip


def test_a_bad_request_harms_nobody(server: Serving, client: Client) -> None:
    """A6, A8, E26, E28, E29: each is told its field, and a good one after it is served."""
    with grpc.insecure_channel(server.address) as channel:
        for bad in BAD:
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(CALL)(bad.request, timeout=10)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(raised.value.details()).startswith(bad.message)
            assert client.generate([letter("A")], SamplingParams(max_tokens=2)).text == "BC"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_tokens"),
    [(63, 1, 1), (60, 4, 4), (60, 5, 4), (60, None, 4), (50, 1000, 14)],
)
def test_max_tokens_is_a_cap(
    client: Client, num_prompt: int, max_tokens: int | None, num_tokens: int
) -> None:
    """A6, E27: up to the model's length and no further."""
    prompt = [letter("A")] * num_prompt
    answer = client.generate(prompt, SamplingParams(max_tokens=max_tokens))
    assert answer.text == _letters(num_tokens)
    assert answer.finish_reason is FinishReason.LENGTH
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_tokens)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=3, temperature=0.0, top_p=1.0, top_k=1),
        SamplingParams(max_tokens=3, temperature=1.0, top_k=1, seed=0),
        SamplingParams(max_tokens=3, top_k=BYTE_VOCAB_SIZE + 5, seed=2**64 - 1),
    ],
)
def test_fields_at_their_limits_work(client: Client, params: SamplingParams) -> None:
    assert client.generate([letter("A")], params).text == "BCD"


def test_an_overflowing_queue_refuses_and_serves_who_got_in(client: Client) -> None:
    """E30: the queue's four get in at least; afterwards all places are free again."""
    params = SamplingParams(max_tokens=24)
    with ThreadPoolExecutor(20) as pool:
        calls = [pool.submit(_outcome, client, params) for _ in range(20)]
        outcomes = [call.result(60) for call in calls]
        served = [outcome.text for outcome in outcomes if isinstance(outcome, Completion)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
        assert len(served) >= MAX_QUEUE
        assert set(served) == {_letters(24)}
        assert refused
        assert all("max_queue = 4" in str(error) for error in refused)
        again = [pool.submit(_outcome, client, params) for _ in range(MAX_QUEUE)]
        assert {call.result(60).text for call in again} == {_letters(24)}  # type: ignore[union-attr]


def _outcome(client: Client, params: SamplingParams) -> Completion | QueueFull:
    try:
        return client.generate([letter("A")], params)
    except QueueFull as error:
        return error
