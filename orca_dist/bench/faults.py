"""Which fault meets which stage when, and how it is brought about.

A round's fault is a signal to the stage's process: two that every process obeys, and some that
`orca_dist.stage.faulty` does. Same seed, same rounds.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from orca_dist.errors import ConfigError


class Fault(StrEnum):
    """What can happen to a stage."""

    KILL = "kill"  # its process dies
    STOP = "stop"  # its process stops, and wakes once it has been given up
    EXCEPTION = "exception"  # a layer raises
    NETCUT = "netcut"  # its data links break
    HANGUP = "hangup"  # its control stream breaks
    HANG = "hang"  # a layer never ends


SIGNALS = {
    Fault.KILL: signal.SIGKILL,
    Fault.STOP: signal.SIGSTOP,
    Fault.EXCEPTION: signal.SIGUSR1,
    Fault.NETCUT: signal.SIGUSR2,
    Fault.HANGUP: signal.SIGHUP,
    Fault.HANG: signal.SIGRTMIN,
}
MAX_SECOND_S = 3.0  # a recovery is often over by then
USUAL = tuple(fault for fault in Fault if fault is not Fault.HANG)  # noticed within seconds
ANY_PROCESS = frozenset({Fault.KILL, Fault.STOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """`after_s` into the recovery, if it lasts so long, `stage` is killed too."""

    stage: int
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """After `delay_s` under load, `fault` meets `stage`."""

    fault: Fault
    stage: int
    delay_s: float
    second: Second | None = None

    def inflict(self, pid: int) -> None:
        os.kill(pid, SIGNALS[self.fault])


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Words with commas between them; raises ConfigError for one that is none."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in list(Fault):
            raise ConfigError(f"faults = {text}: {word!r} is none of {', '.join(Fault)}")
    return tuple(dict.fromkeys(Fault(word) for word in words))


def make_rounds(
    faults: Sequence[Fault],
    num_stages: int,
    *,
    max_delay_s: float,
    seed: int,
    second_share: float = 0.0,
) -> Iterator[Round]:
    """Without an end. Every stage meets every fault before any does again, in a random order.

    In `second_share` of the rounds another stage is killed during the recovery.
    """
    rng, again = random.Random(f"{seed} rounds"), random.Random(f"{seed} seconds")
    pairs = list(itertools.product(faults, range(num_stages)))
    while True:
        for fault, stage in rng.sample(pairs, k=len(pairs)):
            yield Round(
                fault=fault,
                stage=stage,
                delay_s=rng.uniform(0, max_delay_s),
                second=_second(again, stage, num_stages) if again.random() < second_share else None,
            )


def _second(rng: random.Random, stage: int, num_stages: int) -> Second:
    other = (stage + rng.randrange(1, num_stages)) % num_stages
    return Second(stage=other, after_s=rng.uniform(0, MAX_SECOND_S))
