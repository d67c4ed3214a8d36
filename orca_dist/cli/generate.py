"""`orca-dist generate`: one prompt to a server, its answer to the terminal as it comes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from orca_dist.cli.connecting import connect
from orca_dist.cli.interrupts import Interrupted
from orca_dist.cli.output import print_json
from orca_dist.cli.settings import AccessConfig, ClientConfig
from orca_dist.config import LogConfig
from orca_dist.errors import ConfigError, InvalidRequest, OrcaError
from orca_dist.logs import Origin, set_up_logging
from orca_dist.params import SamplingParams

if TYPE_CHECKING:
    from orca_dist.client import Chunk, Completion
    from orca_dist.client.requests import Prompt

STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How to continue the prompt: SamplingParams, but for what no server offers."""

    max_tokens: int | None = None
    """Most tokens to generate; by default as many as the model's length leaves room for."""
    temperature: float = 0.0
    """0 is greedy; higher is more random."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together hold this share of the probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    seed: int | None = None
    """Same seed, same prompt, same tokens; by default drawn for each request."""
    ignore_eos: bool = False
    """Generate on past end-of-sequence tokens."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the answer; may be given up to 16 times."""
    include_stop: bool = False
    """Print the stop that ended the answer, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Send a prompt to a server and print the answer as it is generated."""

    prompt: Positional[str] = STDIN
    """Text to continue; - reads it from stdin."""
    chat: bool = False
    """Send the prompt as a user's chat message, through the model's chat template."""
    request_id: str = ""
    """Name of the request, unique among the server's live ones; by default the server picks one."""
    timeout_s: float | None = None
    """Longest wait for the whole answer; by default none."""
    json: bool = False
    """Print one JSON document at the end instead."""
    sampling: OmitArgPrefixes[SamplingFlags]
    client: OmitArgPrefixes[ClientConfig]
    access: OmitArgPrefixes[AccessConfig]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        """Returns 0; raises the OrcaError that ended the call."""
        from orca_dist.client import joined

        params = self._checked()
        set_up_logging(self.log, Origin())
        prompt = self._prompt()
        with connect(self.client, self.access) as client:
            with _usage_errors():
                chunks = client.stream(
                    prompt, params, request_id=self.request_id, timeout_s=self.timeout_s
                )
            if self.json:
                print_json(_document(joined(chunks)))
            else:
                _print_text(chunks)
        return 0

    def _checked(self) -> SamplingParams:
        """What the flags say; raises ConfigError where they can't work with any server."""
        self.client.check()
        if self.timeout_s is not None and not (0 < self.timeout_s < math.inf):
            raise ConfigError(f"timeout_s = {self.timeout_s}: must be more than 0, and finite")
        params = SamplingParams(**asdict(self.sampling))
        with _usage_errors():
            params.check()
        return params

    def _prompt(self) -> Prompt:
        text = _from_stdin() if self.prompt == STDIN else self.prompt
        return [{"role": "user", "content": text}] if self.chat else text


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("no prompt: give one as an argument, or pipe one in")
    try:
        return sys.stdin.read().removesuffix("\n")  # echo's, no part of the prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on stdin is not UTF-8: {error}") from None


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What is wrong before anything is sent is wrong usage."""
    try:
        yield
    except InvalidRequest as error:
        raise ConfigError(str(error)) from None


def _print_text(chunks: Iterable[Chunk]) -> None:
    text = ""
    try:
        for chunk in chunks:
            text = chunk.text or text
            print(chunk.text, end="", flush=True)
    except (OrcaError, Interrupted):
        if text and not text.endswith("\n"):
            print(flush=True)  # what is said next starts a line
        raise
    print()


def _document(completion: Completion) -> dict[str, object]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": asdict(completion.usage),
    }
