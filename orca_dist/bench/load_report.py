"""What a load on a server shows: throughput, latencies, goodput, failures. Pure arithmetic.

Fields that `simulate` has too mean the same there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from orca_dist.bench.attempt import Attempt
from orca_dist.sim.report import Percentiles, percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a good answer keeps to, in seconds; None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, attempt: Attempt) -> bool:
        """An answer of one token has no time per token, and meets every bound on it."""
        return (
            attempt.is_answered
            and _within(attempt.ttft_s, self.ttft_s)
            and _within(attempt.tpot_s, self.tpot_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that met the bounds: their share of those that ended, and their rate."""

    slo: Slo
    share: float
    req_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Of the requests that were answered, but for `requests` (sent), `errors` (by status) and
    `unfinished` (still out when the run was interrupted).

    `normalized_latency_s` is a request's whole time over its tokens (Orca §6.2), `ttft_s` the
    time to its first token, `tpot_s` the time for each of the others, `inter_token_s` the gap
    between two of them, `latency_s` the whole time. `max_lag_s`: how late the generator was.
    """

    requests: int
    completed: int
    unfinished: int
    errors: dict[str, int]
    duration_s: float
    throughput_req_s: float
    output_tok_s: float
    total_tok_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    normalized_latency_s: Percentiles
    ttft_s: Percentiles
    tpot_s: Percentiles
    inter_token_s: Percentiles
    latency_s: Percentiles
    goodput: Goodput | None
    max_lag_s: float

    def document(self) -> dict[str, object]:
        """For --json."""
        return asdict(self)


def make_report(attempts: Sequence[Attempt], slo: Slo | None = None) -> LoadReport:
    """Of at least one attempt. `slo` None: no goodput is asked for."""
    ended = [each for each in attempts if each.ended_s is not None]
    good = [each for each in ended if each.is_answered]
    duration_s = _duration_s(attempts, good)
    prompt_tokens = sum(each.prompt_len for each in good)
    output_tokens = sum(each.out for each in good)
    return LoadReport(
        requests=len(attempts),
        completed=len(good),
        unfinished=len(attempts) - len(ended),
        errors=dict(sorted(Counter(each.error for each in ended if each.error).items())),
        duration_s=duration_s,
        throughput_req_s=_per_s(len(good), duration_s),
        output_tok_s=_per_s(output_tokens, duration_s),
        total_tok_s=_per_s(prompt_tokens + output_tokens, duration_s),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(each.cached_tokens for each in good),
        normalized_latency_s=percentiles(each.normalized_latency_s for each in good),
        ttft_s=percentiles(each.ttft_s for each in good),
        tpot_s=percentiles(tpot for each in good if (tpot := each.tpot_s) is not None),
        inter_token_s=percentiles(gap for each in good for gap in each.gaps_s()),
        latency_s=percentiles(each.latency_s for each in good),
        goodput=_goodput(slo, ended, duration_s) if slo else None,
        max_lag_s=max(each.sent_s - each.due_s for each in attempts),
    )


def _duration_s(attempts: Sequence[Attempt], good: Sequence[Attempt]) -> float:
    """From the first arrival to the last answer's end."""
    return max(each.token_s[-1] for each in good) - attempts[0].due_s if good else 0.0


def _within(value_s: float | None, bound_s: float | None) -> bool:
    return value_s is None or bound_s is None or value_s <= bound_s


def _goodput(slo: Slo, ended: Sequence[Attempt], duration_s: float) -> Goodput:
    num_met = sum(map(slo.is_met, ended))
    return Goodput(
        slo=slo,
        share=num_met / len(ended) if ended else 0.0,
        req_s=_per_s(num_met, duration_s),
    )


def _per_s(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s else 0.0
