"""A plan in the few numbers that its cost depends on."""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from orca_dist.core import Plan


class BatchShape(NamedTuple):
    """`context`: KV slots that are read, each request's once. `attended`: slots that the
    batch's tokens attend to, summed over the tokens; the same where each has one token.

    A tuple: there is one for each iteration.
    """

    num_tokens: int
    num_sampled: int
    context: int
    attended: float


def batch_shape(plan: Plan) -> BatchShape:
    """Token i of an entry's chunk attends to start + i + 1 slots."""
    lengths = plan.lengths
    num_tokens, context = sum(lengths), sum(plan.starts) + sum(lengths)
    attended: float = context
    if num_tokens > len(lengths):
        squares = sum(map(mul, lengths, lengths))
        attended = sum(map(mul, lengths, plan.starts)) + (squares + num_tokens) / 2
    return BatchShape(num_tokens, sum(plan.samples), context, attended)
