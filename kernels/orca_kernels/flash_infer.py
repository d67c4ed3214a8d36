"""Attention by FlashInfer, where it is installed: its tables of a batch, and its wrapper's calls.

One of its wrappers takes prompts, chunks of prompts and decodes side by side: rows laid end to end
(qo_indptr), pages laid end to end (kv_indptr, kv_indices), and how full each request's last page
is; causal, so that a request's rows are its last positions. Lengths are the host's, pages stay on
the device: nothing is read back. `plan` divides the work once for all layers that are alike, and
a batch is planned once for each kind of layer that a model has.

`plan` writes what it worked out to pinned memory of its wrapper, and gives the stream a copy of
it to make. A wrapper is planned again only when that copy is done; so the host can be a batch ahead
of the device, and no further.

Shapes: T rows, N query heads, M KV heads, D head size, B blocks of S slots, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from orca_kernels.context import AttentionContext

if TYPE_CHECKING:
    from orca_kernels.dispatch import PagedAttention

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)  # those of which FlashInfer's wheels have kernels
WORKSPACE_BYTES = 128 * 2**20  # as it recommends; engine/kv_size.py counts the same
LAYOUT = "NHD"  # of a block: slots, heads, elements
NO_WINDOW = -1


class Wrapper(Protocol):
    """What is called of FlashInfer's BatchPrefillWithPagedKVCacheWrapper."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
    ) -> torch.Tensor: ...


class MakeWrapper(Protocol):
    """The wrapper's class. Wrappers may share a workspace: it is a launch's own."""

    def __call__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> Wrapper: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTables:
    """A batch as FlashInfer takes it, all int32.

    qo_indptr, kv_indptr [R + 1]: where each request's rows and pages begin, and the last ones end.
    kv_indices: the pages, on the device. last_page_len [R]: tokens in each one's last page.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What layers have in common that one plan serves."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None


def tables_of(context: AttentionContext, block_size: int) -> PagedTables:
    """Of a batch whose lengths the host knows. A request may have more blocks than it fills yet."""
    context_lens = [
        start + length for start, length in zip(context.starts, context.lengths, strict=True)
    ]
    num_pages = [-(-context_len // block_size) for context_len in context_lens]
    pages = [blocks[:num] for blocks, num in zip(context.blocks, num_pages, strict=True)]
    is_pinned = context.blocks[0].is_cuda
    return PagedTables(
        qo_indptr=_int32([0, *accumulate(context.lengths)], is_pinned),
        kv_indptr=_int32([0, *accumulate(num_pages)], is_pinned),
        kv_indices=torch.cat(pages).to(torch.int32),
        last_page_len=_int32([(each - 1) % block_size + 1 for each in context_lens], is_pinned),
    )


def _int32(values: Sequence[int], is_pinned: bool) -> torch.Tensor:
    table = torch.tensor(values, dtype=torch.int32)
    return table.pin_memory() if is_pinned else table


class PlannedWrapper:
    """A wrapper for layers of one kind, planned for each batch at the first of them."""

    def __init__(self, wrapper: Wrapper, kind: LayerKind) -> None:
        self._wrapper = wrapper
        self._kind = kind
        self._context: AttentionContext | None = None
        self._copied: torch.cuda.Event | None = None

    def plan(self, context: AttentionContext, tables: PagedTables) -> None:
        """Nothing to do where it has been planned for this batch."""
        if context is self._context:
            return
        if self._copied is not None:
            self._copied.synchronize()
        kind = self._kind
        self._wrapper.plan(
            tables.qo_indptr,
            tables.kv_indptr,
            tables.kv_indices,
            tables.last_page_len,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            kind.block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=NO_WINDOW if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap or 0.0,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
        self._copied = copy_mark() if tables.kv_indices.is_cuda else None
        self._context = context

    def run(self, q_TND: torch.Tensor, k_BSMD: torch.Tensor, v_BSMD: torch.Tensor) -> torch.Tensor:
        """Attention of the batch that was planned: [T, N, D]."""
        return self._wrapper.run(q_TND, (k_BSMD, v_BSMD), out=torch.empty_like(q_TND))


def copy_mark() -> torch.cuda.Event:
    """When it has come, so has all that the current stream was given before."""
    event = torch.cuda.Event()
    event.record()
    return event


class FlashInferAttention:
    """paged_attention() for bfloat16 and float16, and heads of 64, 128 and 256.

    `others` computes what it does not: other types and sizes, and launches that are captured, for
    which FlashInfer would have to know their batch beforehand.
    """

    def __init__(self, make_wrapper: MakeWrapper, others: PagedAttention) -> None:
        self._make_wrapper = make_wrapper
        self._others = others
        self._wrappers: dict[LayerKind, PlannedWrapper] = {}
        self._workspace: torch.Tensor | None = None
        self._context: AttentionContext | None = None
        self._tables: PagedTables

    def __call__(
        self,
        q_TND: torch.Tensor,
        k_BSMD: torch.Tensor,
        v_BSMD: torch.Tensor,
        context: AttentionContext,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See reference.paged_attention."""
        if context.tables is not None or not serves(q_TND, k_BSMD):
            return self._others(q_TND, k_BSMD, v_BSMD, context, scale, window, softcap)
        _, block_size, num_kv_heads, head_dim = k_BSMD.shape
        kind = LayerKind(
            num_heads=q_TND.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=q_TND.dtype,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        wrapper = self._wrapper(kind, q_TND.device)
        wrapper.plan(context, self._tables_of(context, block_size))
        return wrapper.run(q_TND.contiguous(), k_BSMD, v_BSMD)

    def _wrapper(self, kind: LayerKind, device: torch.device) -> PlannedWrapper:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if kind not in self._wrappers:
            made = self._make_wrapper(self._workspace, LAYOUT)
            self._wrappers[kind] = PlannedWrapper(made, kind)
        return self._wrappers[kind]

    def _tables_of(self, context: AttentionContext, block_size: int) -> PagedTables:
        if self._context is not context:
            self._tables = tables_of(context, block_size)
            self._context = context
        return self._tables


def serves(q_TND: torch.Tensor, k_BSMD: torch.Tensor) -> bool:
    """Whether FlashInfer computes such queries over such keys."""
    return q_TND.dtype in DTYPES and k_BSMD.dtype == q_TND.dtype and q_TND.shape[2] in HEAD_DIMS
