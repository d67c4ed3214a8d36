"""How long prompts and answers are: fixed, uniform, or a list, from one short text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from orca_dist.errors import ConfigError

MAX_LEN = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """`listed` in turn, over and over; without it, uniform over [low, high]."""

    low: int = 1
    high: int = 1
    listed: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """None is longer."""
        return max(self.listed) if self.listed else self.high

    @property
    def mean(self) -> float:
        """In the long run."""
        if self.listed:
            return sum(self.listed) / len(self.listed)
        return (self.low + self.high) / 2

    def sampler(self, rng: random.Random) -> Callable[[int], int]:
        """The length of the index-th request."""
        listed = self.listed
        if listed:
            return lambda index: listed[index % len(listed)]
        return lambda index: rng.randint(self.low, self.high)


def parse_lengths(name: str, text: str) -> Lengths:
    """`8`, `32-512` (uniform, both ends included) or `5,50,8` (in turn).

    Raises ConfigError that calls the setting `name`.
    """
    if "," in text:
        return Lengths(listed=tuple(_length(name, text, word) for word in text.split(",")))
    low, dash, high = text.partition("-")
    if not dash:
        return Lengths(listed=(_length(name, text, low),))
    lengths = Lengths(low=_length(name, text, low), high=_length(name, text, high))
    if lengths.low > lengths.high:
        raise ConfigError(f"{name} = {text}: the first length is the larger; turn them around")
    return lengths


def _length(name: str, text: str, word: str) -> int:
    if not word.strip().isdecimal() or not 1 <= int(word) <= MAX_LEN:
        raise ConfigError(
            f"{name} = {text}: needs lengths from 1 to {MAX_LEN}: one (8), a range (32-512) or "
            "a list (5,50,8)"
        )
    return int(word)
