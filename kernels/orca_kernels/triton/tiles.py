"""Which tile of which request each program of an attention launch computes.

Orca's selective batching (§3, S2) splits attention by request and its kernel (§6) lays the
thread blocks of all requests end to end; here programs are laid so over (request, tile of
rows, chunk of context). Worked out on the host from lengths that it knows: nothing is read
from a device. How a request is cut depends on its own lengths alone, so its neighbours
change no bit of it. Knows nothing of triton.

A flat row of a request is one query head of one position: a request of L new tokens has
L * G of them for each KV head, where G query heads share a KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

NARROW = 16  # flat rows of a tile that decodes: the fewest that tensor cores take
SHORT = 128  # a request of no more flat rows has its context cut, too
CHUNK = 512  # the fewest tokens of context worth a program of their own
MAX_CHUNKS = 32  # of one request; the merging kernel takes them in one go
KEYS = 64  # chunks begin at multiples of this: the longest step of the kernel divides it

TILE_COLUMNS = 8
MERGE_COLUMNS = 5
GROWTH = 4  # from one number of programs that is captured to the next


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The programs of one batch for each KV head.

    tiles, int32 [P, 8], the costliest first: the request's first row of the batch, its start,
    its length, its first entry of the block table, the tile's first flat row, the first
    token of its context and the one after the last, and the row of the partial results
    where it leaves its own (-1: it writes the answer).
    merges, int32 [Q, 5], of the tiles whose context is cut: the request's first row, the
    tile's first flat row, how many flat rows it has, the first row of its partial results
    and how many chunks there are.
    """

    tiles: torch.Tensor
    merges: torch.Tensor
    has_wide: bool
    max_merged_rows: int
    num_partial_rows: int

    def on(self, device: torch.device) -> Tiles:
        """The same with its tables on a device; they may still be on their way."""
        if device.type != "cuda":
            return self
        tiles, merges = (
            table.pin_memory().to(device, non_blocking=True) for table in (self.tiles, self.merges)
        )
        return replace(self, tiles=tiles, merges=merges)

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the two tables."""
        return len(self.tiles), len(self.merges)

    def packed(self) -> torch.Tensor:
        """Both tables in one, int64 [N], as tables of a batch go to the device."""
        words = [self.tiles.flatten(), self.merges.flatten()]
        fill = words[0].new_zeros(self.merges.numel() % 2)
        return torch.cat([*words, fill]).view(torch.int64)

    def over(self, packed_N: torch.Tensor) -> Tiles:
        """The same with tables that are views of such a tensor, whatever it holds."""
        words = packed_N.view(torch.int32)
        tiles, merges = words[: self.tiles.numel()], words[self.tiles.numel() :]
        return replace(
            self,
            tiles=tiles.view(self.tiles.shape),
            merges=merges[: self.merges.numel()].view(self.merges.shape),
        )


def tiles_of(
    starts: Sequence[int],
    lengths: Sequence[int],
    num_blocks: Sequence[int],
    group: int,
    wide: int,
) -> Tiles:
    """For requests that compute [start, start + length), whose tables have `num_blocks` entries.

    `group` query heads share a KV head; a wide tile has `wide` flat rows,
    of which as many as NARROW make it a narrow one.
    """
    start, length, blocks = (np.array(each, np.int64) for each in (starts, lengths, num_blocks))
    flat_rows, context_len = length * group, start + length
    size = np.where(flat_rows > NARROW, wide, NARROW)
    chunk = np.where(flat_rows > SHORT, context_len, _chunk(context_len))
    num_tiles, num_chunks = -(-flat_rows // size), -(-context_len // chunk)
    request, index = _numbered(num_tiles * num_chunks)
    tile_row = index // num_chunks[request] * size[request]
    first_key = index % num_chunks[request] * chunk[request]
    num_rows = np.minimum(size[request], flat_rows[request] - tile_row)
    seen_end = start[request] + (tile_row + num_rows - 1) // group + 1
    end_key = np.minimum(first_key + chunk[request], seen_end)
    is_split = num_chunks[request] > 1
    partial_rows = np.where(is_split, num_rows, 0)
    partial = np.where(is_split, _firsts(partial_rows), -1)
    first_row = _firsts(length)[request]
    columns = (first_row, start[request], length[request], _firsts(blocks)[request])
    tiles = np.stack([*columns, tile_row, first_key, end_key, partial], axis=1)
    begins = is_split & (first_key == 0)
    merged = (first_row, tile_row, num_rows, partial, num_chunks[request])
    return Tiles(
        tiles=_int32(tiles[np.argsort(first_key - end_key, kind="stable")]),
        merges=_int32(np.stack(merged, axis=1)[begins]),
        has_wide=bool((size > NARROW).any()),
        max_merged_rows=int(partial_rows.max(initial=0)),
        num_partial_rows=int(partial_rows.sum()),
    )


def decode_tiles_of(
    starts: Sequence[int], num_blocks: Sequence[int], group: int, wide: int
) -> Tiles:
    """For requests that compute one token each, in few sizes, so that launches can be captured.

    There are 1, 4, 16 or 32 (MAX_CHUNKS) times as many programs as if no context were cut. Those
    that are too many have a row of zeros: they hold no row of a request, read and write nothing.
    All but the tables follows from their sizes and how many requests there are.
    """
    exact = tiles_of(starts, [1] * len(starts), num_blocks, group, wide)
    size = wide if group > NARROW else NARROW
    num_uncut, num_rows = -(-group // size) * len(starts), min(size, group)
    num_tiles = num_uncut
    while num_tiles < len(exact.tiles):
        num_tiles = min(num_tiles * GROWTH, num_uncut * MAX_CHUNKS)
    is_cut = num_tiles > num_uncut
    return replace(
        exact,
        tiles=_filled(exact.tiles, num_tiles),
        merges=_filled(exact.merges, num_uncut if is_cut else 0),
        max_merged_rows=num_rows if is_cut else 0,
        num_partial_rows=num_rows * num_tiles if is_cut else 0,
    )


def _filled(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """With rows of zeros at its end."""
    return torch.cat([table, table.new_zeros(num_rows - len(table), table.shape[1])])


def _chunk(context_len: np.ndarray) -> np.ndarray:
    """Tokens of each chunk of a context that is cut."""
    fewest = -(-context_len // MAX_CHUNKS)
    return np.maximum(CHUNK, -(-fewest // KEYS) * KEYS)


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """counts[i] entries for each i, laid end to end: their i, and 0, 1, ... within it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - _firsts(counts)[owner]


def _firsts(counts: np.ndarray) -> np.ndarray:
    """Where each begins, laid end to end."""
    return np.cumsum(counts) - counts


def _int32(table: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table, np.int32))
