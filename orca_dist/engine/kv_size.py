"""How many KV blocks the pipeline has: the same number on every stage, since a request holds
a block of each. The memory that has the least room decides.

Pure arithmetic over what the stages reported once their weights were there. Activations are
estimated from shapes rather than measured, which would cost the start a forward of
max_batch_tokens rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orca_dist.errors import StartupError
from orca_dist.spec import ModelSpec

GIB = 2**30

# As orca_kernels.triton.tiles cuts contexts; its import would bring torch.
MAX_CUT_ROWS = 128  # of a request, times the query heads of a KV head
CHUNK, MAX_CHUNKS = 512, 32  # tokens of a chunk at least; chunks of a context at most
TILE_ROWS = 16  # of a program, times as many heads

# FlashInfer's workspace, and the tables of two kinds of layers: with a window and without.
FLASHINFER_BYTES = 128 * 2**20 + 2 * 9 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """What a stage needs of its memory. Stages of one CPU node share one: `memory` names it.

    total_bytes: 0 where it isn't known. block_bytes: of one KV block in all the stage's layers.
    """

    stage: int
    memory: str
    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    block_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes

    def told(self, num_blocks: int) -> str:
        return (
            f"stage {self.stage}: {_gib(self.weight_bytes)} weights + "
            f"{_gib(self.activation_bytes)} activations + "
            f"{_gib(num_blocks * self.block_bytes)} KV"
        )


def affordable_blocks(rooms: Sequence[StageRoom], share: float, max_blocks: int) -> int:
    """As many as `share` of what weights and activations leave holds, but at most `max_blocks`.

    Raises StartupError with the sum of each stage where that is none.
    """
    num_blocks = max_blocks
    for group in _by_memory(rooms):
        left_bytes = group[0].total_bytes - sum(room.fixed_bytes for room in group)
        affordable = int(left_bytes * share) // sum(room.block_bytes for room in group)
        if affordable < 1:
            raise StartupError(
                f"memory_share = {share:g} of what is left holds no KV block: {_sums(group, 1)}; "
                "raise it, take more nodes or stages, or lower max_batch_tokens"
            )
        num_blocks = min(num_blocks, affordable)
    return num_blocks


def check_blocks(rooms: Sequence[StageRoom], num_blocks: int, block_size: int) -> None:
    """Raises StartupError with the sum of each stage where `num_blocks` don't fit."""
    for group in _by_memory(rooms):
        needed = sum(room.fixed_bytes + num_blocks * room.block_bytes for room in group)
        if needed > group[0].total_bytes:
            raise StartupError(
                f"kv_tokens = {num_blocks * block_size} do not fit: {_sums(group, num_blocks)}; "
                "lower kv_tokens, or take more nodes or stages"
            )


def activation_bytes(
    spec: ModelSpec,
    *,
    rows: int,
    sampled_rows: int,
    itemsize: int,
    has_head: bool,
    cut_len: int = 0,
) -> int:
    """The largest that tensors of one iteration are together, about.

    Four of the hidden size (input, residual, normed, output), queries, keys and values before
    and after rotation, attention's output; then the three of the MLP (what experts take instead)
    or, before it, what attention keeps of cut contexts; of the head its logits in the model's type
    and in fp32. Logits that a request asks for (return_logits) come on top.

    cut_len: the longest context in tokens, where kernels cut it (on GPUs); 0: they don't.
    """
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = 4 * spec.hidden_size + 3 * q_size + 4 * kv_size
    mlp = rows * _mlp_row_bytes(spec, itemsize)
    partial = _partial_bytes(spec, rows, sampled_rows, cut_len)
    head = sampled_rows * spec.vocab_size * (itemsize + 4) if has_head else 0
    return rows * widths * itemsize + max(mlp, partial) + head


def graph_bytes(
    spec: ModelSpec, *, rows: int, num_layers: int, itemsize: int, block_size: int
) -> int:
    """What a stage's graphs of decodes need beside the other activations (stage/graphs.py), about.

    Memory of their own for what they compute, as for the longest contexts; input and tables of up
    to `rows` rows; a scratch block of KV. What the driver keeps of each graph comes on top.
    """
    if not rows:
        return 0
    computed = activation_bytes(
        spec,
        rows=rows,
        sampled_rows=rows,
        itemsize=itemsize,
        has_head=False,
        cut_len=CHUNK * MAX_CHUNKS,
    )
    num_blocks = -(-spec.max_model_len // block_size)
    num_tiles = MAX_CHUNKS * -(-spec.num_heads // spec.num_kv_heads // TILE_ROWS)
    row_bytes = spec.hidden_size * itemsize + 8 * (2 + num_blocks) + 32 * num_tiles + 20
    return computed + rows * row_bytes + num_layers * layer_block_bytes(spec, itemsize, block_size)


def tape_bytes(
    spec: ModelSpec, *, rows: int, num_layers: int, itemsize: int, block_size: int
) -> int:
    """The same on CPUs, where all that a graph's layers compute stays in memory.

    The sizes are `rows` and the powers of two below. Of each row and layer: six of the hidden size
    (two sums, two normed, two outputs), queries, keys and values as one, queries rotated and
    attended, and the three of the MLP.
    """
    if not rows:
        return 0
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = 6 * spec.hidden_size + 3 * q_size + 2 * kv_size + 3 * spec.intermediate_size
    num_blocks = -(-spec.max_model_len // block_size)
    row_bytes = spec.hidden_size * itemsize + 8 * (2 + 4 + num_blocks)
    rows_of_all = rows + (1 << (rows - 1).bit_length()) - 1
    computed = rows_of_all * num_layers * widths * itemsize
    return computed + rows * row_bytes + num_layers * layer_block_bytes(spec, itemsize, block_size)


def layer_block_bytes(spec: ModelSpec, itemsize: int, block_size: int) -> int:
    """Of one KV block in one layer."""
    return spec.kv_bytes_per_token(itemsize) // spec.num_layers * block_size


def _mlp_row_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Gate, up and what comes of them; of experts so for each that a row goes through, with its
    input and output, the latter also in the row's order, and two sums in fp32."""
    plain, experts = 3 * spec.intermediate_size * itemsize, spec.experts
    if experts is None:
        return plain
    each = 3 * (experts.intermediate_size + spec.hidden_size) * itemsize
    mixture = experts.num_chosen * each + 8 * spec.hidden_size
    return mixture if len(experts.layers) == spec.num_layers else max(plain, mixture)


def _partial_bytes(spec: ModelSpec, rows: int, num_requests: int, cut_len: int) -> int:
    """Peak, total and weighted values of each head in fp32, for every chunk of a cut context.

    At most, that is where all requests are short pieces behind the longest context.
    """
    num_chunks = min(MAX_CHUNKS, -(-cut_len // CHUNK))
    if num_chunks < 2:
        return 0
    rows_each = MAX_CUT_ROWS * spec.num_kv_heads // spec.num_heads
    return (
        min(rows, num_requests * rows_each) * num_chunks * spec.num_heads * (spec.head_dim + 2) * 4
    )


def _by_memory(rooms: Sequence[StageRoom]) -> list[list[StageRoom]]:
    """Stages that share one, together; without those whose size isn't known."""
    groups: dict[str, list[StageRoom]] = {}
    for room in rooms:
        if room.total_bytes:
            groups.setdefault(room.memory, []).append(room)
    return list(groups.values())


def _sums(group: Sequence[StageRoom], num_blocks: int) -> str:
    told = ", ".join(room.told(num_blocks) for room in group)
    return f"{told}; {group[0].memory} has {_gib(group[0].total_bytes)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
