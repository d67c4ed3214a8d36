"""From a plan to a flat mixed batch: the packing half of selective batching (Orca §3, S2).

Owns what this stage knows of its requests, which is only what plans said: admit
brings one, step moves it, drop forgets it. Membership, memory and completion are
never decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from orca_kernels import AttentionContext, DecodeTables

from orca_dist.device.seam import PASSED
from orca_dist.device.staging import Upload, Uploads
from orca_dist.proto.v1.control_pb2 import Admit, Plan, Sampling
from orca_dist.stage.sampler import Sampled, parameters
from orca_dist.transport.channel import Arrival


@dataclass(slots=True)
class StageRequest:
    """`slots` are the flat KV slots of positions 0, 1, ...; `blocks` the same in blocks.

    All of it on the host.
    """

    tokens: list[int]
    blocks: torch.Tensor
    slots: torch.Tensor
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What a batch of decodes gets beside its own so that a graph can take it (graphs.py).

    num_rows: of the batch and its padding. attention: its tables for both, still on the host;
    their sizes and num_rows tell which graph it is. The others go to the device, int64: positions,
    slots and blocks behind the batch's own, and attention's as `tables`.
    """

    num_rows: int
    attention: DecodeTables
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    blocks: torch.Tensor


# From starts, lengths, and how many blocks each has. None: no graph takes such a batch.
Pad = Callable[[Sequence[int], Sequence[int], Sequence[int]], Padding | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """All that a graph reads of a batch but its rows of x, as it comes to the device in one piece.

    Positions, slots, attention's tables, blocks: each the batch's own, and its padding.
    """

    padding: Padding
    tables_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """T = ΣL rows: the entries of a plan back to back, initiations and increments alike.

    `sampled_rows_R`: the rows that need logits. `parameters_EP`: of the entries that sample, on
    the last stage (see stage/sampler). `tables` is the arrival of every tensor. `graph`: the same
    once more for a graph, where one takes it.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    context: AttentionContext
    sampled: list[Sampled]
    sampled_rows_R: torch.Tensor
    parameters_EP: torch.Tensor
    tables: Arrival = PASSED
    graph: GraphInput | None = None

    @property
    def num_rows(self) -> int:
        return len(self.positions_T)


class RequestTable:
    """The requests that plans have introduced to this stage; the last one samples."""

    def __init__(
        self,
        *,
        block_size: int,
        max_len: int,
        uploads: Uploads,
        is_last: bool,
        pad: Pad | None = None,
    ) -> None:
        self._pad = pad
        self._nothing = torch.empty(0, dtype=torch.int64)
        self._block_size = block_size
        self._positions = torch.arange(max_len)
        self._offsets = torch.arange(block_size)
        self._uploads = uploads
        self._is_last = is_last
        self._requests: dict[int, StageRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def apply(self, plan: Plan) -> None:
        """Drops, then admits, then the tokens and blocks that steps bring."""
        for request_id in plan.drops:
            del self._requests[request_id]
        for admit in plan.admits:
            self._requests[admit.id] = self._introduce(admit)
        for request_id, tokens in _dealt(plan.ids, plan.num_new_tokens, plan.new_tokens):
            self._requests[request_id].tokens.extend(tokens)
        for request_id, blocks in _dealt(plan.ids, plan.num_new_blocks, plan.new_blocks):
            self._extend(self._requests[request_id], blocks)

    def pack(self, plan: Plan) -> PackedBatch:
        """The plan's steps as one batch; call apply() first."""
        requests = [self._requests[request_id] for request_id in plan.ids]
        spans = [slice(a, a + n) for a, n in zip(plan.starts, plan.lengths, strict=True)]
        pairs = list(zip(requests, spans, strict=True))
        token_ids = [token for request, span in pairs for token in request.tokens[span]]
        sampled = self._sampled(plan)
        drawn = parameters(sampled if self._is_last else [])
        num_blocks = [len(request.blocks) for request in requests]
        padding = self._pad(plan.starts, plan.lengths, num_blocks) if self._pad else None
        upload = self._uploads.send(
            [
                torch.cat([self._positions[span] for span in spans]),
                padding.positions if padding else self._nothing,
                torch.cat([request.slots[span] for request, span in pairs]),
                padding.slots if padding else self._nothing,
                padding.tables if padding else self._nothing,
                *(request.blocks for request in requests),
                padding.blocks if padding else self._nothing,
                torch.tensor(token_ids),
                torch.tensor([row for entry in sampled for row in entry.rows], dtype=torch.int64),
                drawn.flatten(),
            ]
        )
        positions_T, _, slots_T, _, _, *blocks, _, token_ids_T, sampled_rows_R, flat = upload.tables
        return PackedBatch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            context=AttentionContext(
                starts=list(plan.starts),
                lengths=list(plan.lengths),
                blocks=blocks,
                slots_T=slots_T,
            ),
            sampled=sampled,
            sampled_rows_R=sampled_rows_R,
            parameters_EP=flat.view(drawn.shape),
            tables=upload,
            graph=None if padding is None else _graph_input(padding, upload),
        )

    def _introduce(self, admit: Admit) -> StageRequest:
        blocks = torch.tensor(admit.blocks)
        return StageRequest(
            tokens=list(admit.tokens),
            blocks=blocks,
            slots=self._slots(blocks),
            sampling=admit.sampling,
        )

    def _extend(self, request: StageRequest, more: Sequence[int]) -> None:
        blocks = torch.tensor(more)
        request.blocks = torch.cat([request.blocks, blocks])
        request.slots = torch.cat([request.slots, self._slots(blocks)])

    def _slots(self, blocks: torch.Tensor) -> torch.Tensor:
        return (blocks[:, None] * self._block_size + self._offsets).flatten()

    def _sampled(self, plan: Plan) -> list[Sampled]:
        sampled, row = [], 0
        columns = zip(plan.ids, plan.starts, plan.lengths, plan.samples, strict=True)
        for request_id, start, length, samples in columns:
            row += length
            sampling = self._requests[request_id].sampling
            if not samples and not sampling.return_logits:
                continue
            first = row - length if sampling.return_logits else row - 1
            sampled.append(
                Sampled(
                    id=request_id,
                    rows=range(first, row),
                    samples=samples,
                    position=start + length,
                    sampling=sampling,
                )
            )
        return sampled


def _graph_input(padding: Padding, upload: Upload) -> GraphInput:
    """All of an upload but its last three tables."""
    return GraphInput(padding=padding, tables_N=upload.first(len(upload.tables) - 3))


def _dealt(
    ids: Sequence[int], counts: Sequence[int], flat: Sequence[int]
) -> Iterator[tuple[int, Sequence[int]]]:
    """Each id with its part of a flat column; those without one are left out."""
    taken = 0
    for request_id, count in zip(ids, counts, strict=True):
        if count:
            yield request_id, flat[taken : taken + count]
            taken += count
