"""The flags of `simulate` that say what comes in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import MAX_LEN, parse_lengths
from orca_dist.sim.trace import read_workload
from orca_dist.sim.workload import Arrivals, Workload, make_workload

NUM_REQUESTS = 1000
PROMPT_LEN = "32-512"
OUTPUT_LENS = "1-128"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFlags:
    """A file, or lengths and arrivals to draw from."""

    workload: Path | None = None
    """Requests from a file, .json, .jsonl or .csv, instead of the following."""
    num_requests: int | None = None
    """Requests to simulate; by default as many as --output-lens lists, else 1000."""
    prompt_len: str = PROMPT_LEN
    """Tokens of a prompt: 8, a range to draw from (32-512), or a list to go through (5,50,8)."""
    output_lens: str = OUTPUT_LENS
    """Tokens of an answer, written like --prompt-len."""
    rate: float | None = None
    """Requests per second; by default all come at once."""
    rates: str = ""
    """Several of them, such as 1,2,4,8: a run for each."""
    cv: float = 1.0
    """Variation of the gaps between arrivals: 1 is Poisson, more comes in bursts, 0 is steady."""
    clients: int | None = None
    """Requests out at once; the next goes when one is answered. By default no bound."""
    seed: int = 0
    """Same seed, same requests."""
    reserve_len: int | None = None
    """Slots that each request asks for, prompt and answer together, though it may need fewer."""
    whole_batches: bool = False
    """Answers reach their clients when the last of their batch has ended (FasterTransformer)."""

    def each_rate(self) -> list[float]:
        """Of --rates; empty without it."""
        if not self.rates:
            return []
        for name, value in (("workload", self.workload), ("rate", self.rate)):
            if value is not None:
                raise ConfigError(f"rates = {self.rates}: can't go with {name}; leave one out")
        return [_rate(self.rates, word) for word in self.rates.split(",")]

    def make(self, rate: float | None = None) -> Workload:
        """The workload; `rate` in place of the flag's. Raises ConfigError."""
        if self.reserve_len is not None and not 1 <= self.reserve_len <= MAX_LEN:
            raise ConfigError(
                f"reserve_len = {self.reserve_len}: must be at least 1 and at most {MAX_LEN}"
            )
        arrivals = Arrivals(
            rate=self.rate if rate is None else rate, cv=self.cv, clients=self.clients
        )
        arrivals.check()
        if self.workload is not None:
            self._check_file_alone()
            return read_workload(self.workload, clients=self.clients)
        outputs = parse_lengths("output_lens", self.output_lens)
        return make_workload(
            num_requests=self._num_requests(len(outputs.listed)),
            prompt_lens=parse_lengths("prompt_len", self.prompt_len),
            output_lens=outputs,
            arrivals=arrivals,
            seed=self.seed,
        )

    def _num_requests(self, num_listed: int) -> int:
        if self.num_requests is not None:
            return self.num_requests
        return num_listed if num_listed > 1 else NUM_REQUESTS

    def _check_file_alone(self) -> None:
        given = {
            "num_requests": self.num_requests is not None,
            "prompt_len": self.prompt_len != PROMPT_LEN,
            "output_lens": self.output_lens != OUTPUT_LENS,
            "rate": self.rate is not None,
            "cv": self.cv != 1,
        }
        for name, is_given in given.items():
            if is_given:
                raise ConfigError(f"{name}: the file {self.workload} says it; leave one out")


def _rate(text: str, word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        raise ConfigError(f"rates = {text}: needs numbers, such as 1,2,4,8") from None
    Arrivals(rate=rate).check()
    return rate
