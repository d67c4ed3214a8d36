"""How many layers each stage gets, so that all take about as long: `--split auto`.

An iteration costs a stage its multiply-adds for each row, as counted by Narayanan et al.
(SC'21, appendix: 2 operations for each weight and row in a matmul, 4 for each position, head
and element in attention): a layer its matrices and its attention, the last stage the output
head besides, for the rows that sample. When weights are what is waited for (small batches), the
bytes are in the same proportion. The embedding is a look-up: nothing. KV slots are as many on
every stage, so a stage's memory goes by its layers too.
Pure: no torch, no file. What isn't known here is assumed: see the two constants.
"""

from __future__ import annotations

from orca_dist.core import sizes_by_cost, split_layers
from orca_dist.spec.model import ModelSpec

EXPECTED_LEN = 1024  # tokens of a request, prompt and answer; at most the model's length
SAMPLED_SHARE = 1 / 3  # of rows: between the paper's mix (0.19) and chats that answer at length
_ROUNDING = 1e-9


def layer_cost(spec: ModelSpec) -> float:
    """Multiply-adds a row of the average layer, at half the expected length."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (2 * q_size + 2 * kv_size)
    return attention + _mlp_cost(spec) + 2 * q_size * _mean_context(spec)


def _mlp_cost(spec: ModelSpec) -> float:
    """Of the average layer: its MLP, or a router and the experts that a row goes through."""
    plain = 3 * spec.hidden_size * spec.intermediate_size
    if spec.experts is None:
        return plain
    experts, share = spec.experts, len(spec.experts.layers) / spec.num_layers
    chosen = experts.num_chosen * 3 * spec.hidden_size * experts.intermediate_size
    return (1 - share) * plain + share * (spec.hidden_size * experts.num_experts + chosen)


def head_cost(spec: ModelSpec) -> float:
    """Multiply-adds of the output head for each row of a batch."""
    return SAMPLED_SHARE * spec.vocab_size * spec.hidden_size


def head_layers(spec: ModelSpec) -> float:
    """The output head's cost in layers."""
    return head_cost(spec) / layer_cost(spec)


def balanced_sizes(spec: ModelSpec, num_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage; None where an even split is as good.

    That is where the slowest stage would become faster by less than one layer: the counts
    are estimates, and the even split is the one that people expect.
    """
    even = [len(layers) for layers in split_layers(spec.num_layers, num_stages)]
    head = [0.0] * (num_stages - 1) + [head_layers(spec)]
    balanced = sizes_by_cost(spec.num_layers, [1.0] * num_stages, head)
    gain = slowest(even, head_layers(spec)) - slowest(balanced, head_layers(spec))
    return tuple(balanced) if gain >= 1 - _ROUNDING else None


def slowest(sizes: list[int] | tuple[int, ...], head: float) -> float:
    """The slowest stage's time in layers, where the head costs as much as `head` layers."""
    return max(*sizes[:-1], sizes[-1] + head, 0.0)


def _mean_context(spec: ModelSpec) -> float:
    """Positions that a row sees, on average over its request and over the layers."""
    half = min(EXPECTED_LEN, spec.max_model_len) / 2
    windows = [spec.window(layer) for layer in range(spec.num_layers)]
    return sum(half if window is None else min(half, window) for window in windows) / len(windows)
