"""Decodes as graphs: a stage's layers over a batch of single tokens, captured once and replayed.

The kernels of a decode are so short that launching one takes the host longer than it takes the
device to run it. On CPUs nothing is launched, but Python takes as long between two of them; there
their calls go on a tape (orca_kernels' cpu/tape.py). So a plan in which every request computes one
token is padded to the next of few sizes, its layers are captured when a size first comes, and from
then on one call launches them all. A size is a number of rows and, on GPUs, one of attention's
programs (orca_kernels' tiles.py), at most four for a number of rows. Prompts and mixed batches go
without.

Why a replay is right for whatever plan it is given:

- What is captured knows no plan. It takes static buffers, and a context that has no starts and no
  lengths: a kernel that asks the host for them finds none, at the first capture.
- A plan's tables and rows are copied into these buffers by the compute stream, between the replay
  before and this one. The tables came in one upload, which had been waited for.
- Rows that pad belong to nobody. They stand at position 0 of a scratch block, the one behind all
  that the scheduler knows of, and see nothing else; no row of a batch sees another's.
- All graphs of a GPU share one pool of memory, so what a replay leaves is copied before the next:
  what is sent and what is sampled never lies in the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from orca_kernels import AttentionContext, Kernels
from orca_kernels.dispatch import Capture, MakeDecodeTables

from orca_dist.device.seam import Work
from orca_dist.models.decoder import Decoder
from orca_dist.spec import ModelSpec
from orca_dist.stage.batch import GraphInput, Padding
from orca_dist.stage.kv_store import KVStore

log = logging.getLogger(__name__)

Size = tuple[int, ...]  # rows; on GPUs programs of attention for each KV head, contexts merged


def tables_maker(
    spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, max_rows: int
) -> MakeDecodeTables | None:
    """Of a model's layers; None where no graph is wanted, or their kernels can't be captured."""
    if not max_rows or kernels.decode_tables is None:
        return None
    return kernels.decode_tables(
        group=spec.num_heads // spec.num_kv_heads, head_dim=spec.head_dim, itemsize=dtype.itemsize
    )


def padded_rows(num_rows: int, max_rows: int) -> int:
    """Rows of the smallest graph that takes so many: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, …

    The largest has `max_rows`.
    """
    size = 1
    while size < num_rows:
        size = size // 2 * 3 if size >= 16 and size & (size - 1) == 0 else next_power(size)
    return min(size, max_rows)


def next_power(size: int) -> int:
    """The smallest power of two above it."""
    return 1 << size.bit_length()


class DecodeGraphs:
    """The graphs of one stage over one KV store, for batches of at most `max_rows` decodes.

    `max_blocks`: of one request. Shapes: R rows of a graph, T <= R of a batch, H hidden.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        capture: Capture,
        decoder: Decoder,
        cache: KVStore,
        make_tables: MakeDecodeTables,
        dtype: torch.dtype,
        max_rows: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        self._capture = capture
        self._decoder = decoder
        self._cache = cache
        self._make_tables = make_tables
        self._max_rows = max_rows
        self._scratch_block = cache.num_blocks
        self._scratch_slot = cache.num_blocks * block_size
        self._replays: dict[Size, Work] = {}
        longest = self._make_tables([max_blocks * block_size - 1] * max_rows, [1] * max_rows)
        num_words = 2 * max_rows + len(longest.packed()) + max_rows * max_blocks
        hidden = decoder.spec.hidden_size
        self._x_RH = torch.zeros(max_rows, hidden, dtype=dtype, device=device)
        self._tables_N = torch.zeros(num_words, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Of the static buffers."""
        return self._x_RH.nbytes + self._tables_N.nbytes

    @property
    def sizes(self) -> list[Size]:
        """Those captured so far."""
        return list(self._replays)

    def pad(
        self, starts: Sequence[int], lengths: Sequence[int], num_blocks: Sequence[int]
    ) -> Padding | None:
        """What fills a batch up to the size of a graph. None: too large, or not all decodes."""
        if any(length != 1 for length in lengths) or len(lengths) > self._max_rows:
            return None
        num_rows = padded_rows(len(lengths), self._max_rows)
        num = num_rows - len(lengths)
        attention = self._make_tables([*starts, *[0] * num], [*num_blocks, *[1] * num])
        return Padding(
            num_rows=num_rows,
            attention=attention,
            positions=torch.zeros(num, dtype=torch.int64),
            slots=torch.full((num,), self._scratch_slot),
            tables=attention.packed(),
            blocks=torch.full((num,), self._scratch_block),
        )

    def run(self, x_TH: torch.Tensor, graph: GraphInput) -> torch.Tensor:
        """The layers over a batch, [T, H] -> [T, H]; its first run captures the size."""
        num_rows, padding = len(x_TH), graph.padding
        self._x_RH[:num_rows].copy_(x_TH)
        self._tables_N[: len(graph.tables_N)].copy_(graph.tables_N)
        size = (padding.num_rows, *padding.attention.sizes)
        if size not in self._replays:
            self._replays[size] = self._captured(padding)
            log.debug("captured decodes of %d rows; attention's tables: %s", size[0], size[1:])
        return kept(self._replays[size]()[:num_rows])

    def _captured(self, padding: Padding) -> Work:
        try:
            return self._capture(self._work(padding))
        except RuntimeError as error:
            raise RuntimeError(
                f"a batch of {padding.num_rows} decodes could not be captured as a graph: {error}; "
                "on GPUs --cuda-graphs off does without"
            ) from error

    def _work(self, padding: Padding) -> Work:
        """What is captured: the layers over the static buffers, as this size divides them."""
        num_rows = padding.num_rows
        num_tables, rest = len(padding.tables), len(self._tables_N) - 2 * num_rows
        positions_R, slots_R, tables, blocks = self._tables_N.split(
            [num_rows, num_rows, num_tables, rest - num_tables]
        )
        own = padding.attention.over(tables)
        context = AttentionContext(
            starts=[], lengths=[], blocks=[blocks], slots_T=slots_R, tables=own
        )
        return partial(
            self._decoder.forward,
            self._x_RH[:num_rows],
            positions_R,
            self._cache,
            context,
            on_layer=_go_on,
        )


def kept(y_TH: torch.Tensor) -> torch.Tensor:
    """Out of the pool, before the next replay is given to the stream."""
    return y_TH.clone()


def _go_on() -> None:
    """Between two layers of what is captured nobody can be asked."""
