"""A plan in the few numbers that its cost depends on."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Of an iteration as it is planned."""
    return shape_of_spans(plan.starts, plan.lengths, sum(plan.samples))


def shape_of_spans(starts: Sequence[int], lengths: Sequence[int], num_sampled: int) -> BatchShape:
    """Token i of an entry's chunk attends to start + i + 1 slots."""
    num_tokens = sum(lengths)
    context = sum(starts) + num_tokens
    attended: float = context
    if num_tokens > len(lengths):
        squares = sum(map(mul, lengths, lengths))
        attended = sum(map(mul, lengths, starts)) + (squares + num_tokens) / 2
    return BatchShape(num_tokens, num_sampled, context, attended)
