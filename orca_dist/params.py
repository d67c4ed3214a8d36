"""Sampling parameters as a caller writes them: one dataclass for LLM, client and server.

Owns the limits of every field; what passes here can't break a batch. The core's
Sampling is what is left once defaults and the seed are settled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from orca_dist.core import Sampling
from orca_dist.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**32 - 1
MAX_STOPS = 16
MAX_STOP_LEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    max_tokens: most tokens to generate; None: as many as the model's length leaves room for.
    temperature: 0 (the default) is greedy.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the likeliest tokens that together hold this share, in (0, 1].
    min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    seed: same seed, same prompt, same tokens; None: drawn once per request.
    ignore_eos: generate on past end-of-sequence tokens.
    stop: texts that end the answer, at most 16 of at most 256 characters; a str is one.
    include_stop: the stop that ended the answer is part of its text.
    return_logits: also return the fp32 logits of every computed position (golden tests).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    return_logits: bool = False

    def __post_init__(self) -> None:
        """Any sequence of stops does, and one text alone."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)

    def check(self) -> None:
        """Raises InvalidRequest naming the first field that is out of its range."""
        self._check_kinds()
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{self.max_tokens} is less than 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest("temperature", f"{self.temperature} is not a finite number >= 0")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InvalidRequest(
                "top_k", f"{self.top_k} is not in [0, {MAX_TOP_K}]; 0 keeps all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequest("top_p", f"{self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequest("min_p", f"{self.min_p} is not in [0, 1]")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed", f"{self.seed} is not in [0, 2^64 - 1]")
        _check_stop(self.stop)

    def _check_kinds(self) -> None:
        """Python callers can put anything anywhere; a stage can't take it."""
        for name in ("max_tokens", "seed"):
            _of_kind(name, getattr(self, name) or 0, Integral, "a whole number")
        _of_kind("top_k", self.top_k, Integral, "a whole number")
        for name in ("temperature", "top_p", "min_p"):
            _of_kind(name, getattr(self, name), Real, "a number")
        for name in ("ignore_eos", "include_stop", "return_logits"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(name, f"{value!r} is neither True nor False")

    def settled(self, seed: int) -> Sampling:
        """What the stages need; `seed` stands in where the caller gave none."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed if self.seed is None else self.seed,
            return_logits=self.return_logits,
        )


def _of_kind(name: str, value: object, kind: type, words: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise InvalidRequest(name, f"{value!r} is not {words}")


def check_num_stops(num: int) -> None:
    """Raises InvalidRequest for more stop texts than are allowed."""
    if num > MAX_STOPS:
        raise InvalidRequest("stop", f"{num} texts; at most {MAX_STOPS} are allowed")


def _check_stop(stop: tuple[str, ...]) -> None:
    check_num_stops(len(stop))
    for index, text in enumerate(stop):
        if not isinstance(text, str):
            raise InvalidRequest("stop", f"{text!r} is not a text")
        if not text:
            raise InvalidRequest("stop", f"text {index} is empty; leave it out")
        if len(text) > MAX_STOP_LEN:
            raise InvalidRequest(
                "stop",
                f"text {index} has {len(text)} characters; at most {MAX_STOP_LEN} are allowed",
            )
