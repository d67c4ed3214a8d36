"""StageWorker: a block of layers, its KV, its two links, and what it does with a plan.

A plain class: actor.py is a thin Ray shell around it, process.py runs it in a
local process. Follows plans in order and decides nothing. Only the last stage
waits for its device; the others hand their output on and take the next plan.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from orca_kernels import Kernels, kernels_for

from orca_dist.device.seam import Device
from orca_dist.device.staging import Uploads, download
from orca_dist.models.decoder import Decoder
from orca_dist.models.layers import Weights
from orca_dist.proto.v1.control_pb2 import Loaded, Open, Plan, Result, Setup
from orca_dist.spec import ModelSpec
from orca_dist.stage.backend import with_attention
from orca_dist.stage.batch import PackedBatch, RequestTable
from orca_dist.stage.device import make_device
from orca_dist.stage.graphs import DecodeGraphs, tables_maker
from orca_dist.stage.kv_store import KVStore
from orca_dist.stage.sampler import asked_for, result_of
from orca_dist.stage.trace import StagePhase, StageTrace, TraceRow
from orca_dist.stage.weights import OnBytes, StageWeights
from orca_dist.transport.channel import Arrival, Channel
from orca_dist.transport.interfaces import gloo_host, interfaces_here, set_nccl_interface
from orca_dist.transport.links import LinkConfig, open_links
from orca_dist.transport.rendezvous import host_store, join_store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """A plan that was taken in: its batch is packed, and its input is on its way.

    `arrival` is of `x_TH`, [T, H]; both are None on the first stage, which embeds tokens.
    """

    plan_seq: int
    received_s: float
    batch: PackedBatch
    x_TH: torch.Tensor | None
    arrival: Arrival | None


class EpochOver(Exception):
    """This epoch's compute thread has nothing to do any more."""


class StageWorker:
    """Life: load() once; then for each epoch a fresh() one: open(), take_in() and run() plan
    after plan, end().

    `look_ahead` is called before each layer: there the next plan may be taken in, so that its
    input arrives while this one's layers are computed. Decodes may run as graphs (graphs.py): all
    layers are one call then, and it is called before and after that.

    Workers of several epochs share weights, KV memory, graphs and trace; `_turn` lets one of them
    compute at a time, and one whose epoch is over stops at the next layer, so that a
    thread which was stuck in the old epoch can't write into the new one's KV.
    """

    trace: StageTrace
    _spec: ModelSpec
    _setup: Setup
    _device: Device
    _dtype: torch.dtype
    _kernels: Kernels
    _decoder: Decoder
    _table: RequestTable
    _cache: KVStore | None
    _graphs: DecodeGraphs | None

    def __init__(self, *, host: str) -> None:
        self.host = host
        self._link_host = host
        self.trace = StageTrace()
        self.look_ahead: Callable[[], None] = lambda: None
        self.last_input_seq = 0
        self.num_requests = 0  # that this epoch's table holds
        self._store: dist.Store | None = None
        self._previous: Channel | None = None
        self._next: Channel | None = None
        self._made: list[Channel] = []  # links that end() aborts
        self._cache = self._graphs = None
        self._turn = threading.Lock()
        self._over = threading.Event()

    def fresh(self) -> StageWorker:
        """For the next epoch: the same weights and KV memory, no links and no requests."""
        worker = copy.copy(self)
        worker._previous = worker._next = None
        worker._made = []
        worker._over = threading.Event()
        return worker

    # ---- start ---------------------------------------------------------

    def load(self, setup: Setup, on_bytes: OnBytes = lambda done, total: None) -> Loaded:
        """Read this stage's tensors, and no others, straight to its device.

        `on_bytes` hears of each tensor: bytes read so far, and in all.
        """
        self._setup = setup
        self._link_host = self._settle_interface(setup.link)
        self._device = make_device(setup.device)
        self._dtype = getattr(torch, setup.dtype)
        weights = StageWeights(setup, self._device.torch_device)
        weights.fetch(on_bytes)
        self._spec = weights.spec
        self._make_decoder(weights.read(on_bytes))
        held_bytes = self._decoder.weight_bytes
        log.info("layers %d-%d are on %s: %s", *self._ends, setup.device, weights.told(held_bytes))
        return Loaded(
            device=str(self._device.torch_device),
            weight_bytes=held_bytes,
            free_bytes=self._device.free_bytes,
            node_bytes=self._device.host_bytes,
            store_address=self._host_store() if setup.stage == 0 else "",
            fetched_bytes=weights.fetched_bytes,
            fetch_s=weights.fetch_s,
            read_bytes=weights.read_bytes,
            read_s=weights.read_s,
        )

    def _make_decoder(self, weights: Weights) -> None:
        device = self._device.torch_device
        kernels = kernels_for(device, self._dtype, self._setup.num_threads)
        kernels = with_attention(kernels, self._setup.attention_backend)
        torch.set_num_threads(1 if kernels.has_own_threads else self._setup.num_threads)
        self._kernels = kernels
        self._decoder = Decoder(
            spec=self._spec,
            layers=self._layers,
            weights=weights,
            kernels=kernels,
            device=device,
            dtype=self._dtype,
        )

    def open(self, epoch: Open) -> None:
        """Make this epoch's links and an empty KV store."""
        previous, following = self._open_links(epoch)
        if self._over.is_set():
            raise EpochOver
        self.begin(previous, following, num_blocks=epoch.num_blocks)

    def begin(
        self, previous: Channel | None, following: Channel | None, *, num_blocks: int
    ) -> None:
        """Start an epoch over links that exist (None at the pipeline's ends)."""
        setup = self._setup
        self._previous, self._next = previous, following
        self.trace.enter(StagePhase.IDLE)  # what the last epoch was stuck in is over
        if self._cache is None or self._cache.num_blocks != num_blocks:
            self._make_cache(num_blocks)
        self._table = RequestTable(
            block_size=setup.block_size,
            max_len=self._spec.max_model_len,
            uploads=Uploads(self._device, num_buffers=setup.inflight + 1),
            is_last=self._is_last,
            pad=None if self._graphs is None else self._graphs.pad,
        )
        self.num_requests = 0

    def _make_cache(self, num_blocks: int) -> None:
        """KV memory, and graphs over it where this stage is to have some and its kernels can."""
        setup, device = self._setup, self._device
        make_tables = tables_maker(self._spec, self._kernels, self._dtype, setup.graph_rows)
        self._graphs = None
        self._cache = KVStore(
            spec=self._spec,
            layers=self._layers,
            num_blocks=num_blocks,
            num_scratch=0 if make_tables is None else 1,
            block_size=setup.block_size,
            kernels=self._kernels,
            dtype=self._dtype,
            device=device.torch_device,
        )
        if make_tables is not None:
            self._graphs = DecodeGraphs(
                device=device.torch_device,
                capture=self._kernels.capture or device.capture,
                decoder=self._decoder,
                cache=self._cache,
                make_tables=make_tables,
                dtype=self._dtype,
                max_rows=setup.graph_rows,
                max_blocks=-(-self._spec.max_model_len // setup.block_size),
                block_size=setup.block_size,
            )

    def _settle_interface(self, link: str) -> str:
        """Where links bind; raises StartupError for a wrong name in this node's environment."""
        if link == "nccl":
            set_nccl_interface(self.host, os.environ, interfaces_here())
            return self.host
        return gloo_host(self.host, os.environ, interfaces_here())

    def _open_links(self, epoch: Open) -> tuple[Channel | None, Channel | None]:
        setup = self._setup
        store = self._store or join_store(epoch.store_address, epoch.link_timeout_s)
        config = LinkConfig(
            kind=setup.link,
            stage=setup.stage,
            num_stages=setup.num_stages,
            host=self._link_host,
            device=self._device,
            timeout_s=epoch.link_timeout_s,
            max_pending=setup.inflight,
        )
        return open_links(config, store, epoch.epoch, self._note_link)

    def _note_link(self, channel: Channel) -> None:
        self._made.append(channel)
        if self._over.is_set():  # end() may have come just before
            raise EpochOver

    @property
    def _layers(self) -> range:
        return range(self._setup.first_layer, self._setup.end_layer)

    @property
    def _ends(self) -> tuple[int, int]:
        """The first and the last layer."""
        return self._layers[0], self._layers[-1]

    def _host_store(self) -> str:
        self._store, address = host_store(self.host, timeout_s=300.0)
        return address

    # ---- the loop's body -----------------------------------------------

    @torch.inference_mode()
    def take_in(self, plan: Plan, received_s: float) -> Iteration | None:
        """The next plan, in order; the one before may still be computed. None: no batch in it."""
        self._table.apply(plan)
        self.num_requests = len(self._table)
        if not plan.ids:
            return None
        batch = self._table.pack(plan)
        x_TH, arrival = self._post_recv(batch)
        return Iteration(
            plan_seq=plan.seq, received_s=received_s, batch=batch, x_TH=x_TH, arrival=arrival
        )

    @torch.inference_mode()
    def run(self, iteration: Iteration) -> Result | None:
        """One iteration; the last stage returns its tokens, the others send x on."""
        row, batch = TraceRow(iteration.plan_seq, iteration.received_s), iteration.batch
        x_TH = self._input(iteration)
        self.last_input_seq = iteration.plan_seq
        with self._turn:
            row.input_ready_s = row.compute_start_s = self._enter_layer()
            x_TH = self.compute(x_TH, batch)
            result = self._sample(x_TH, batch, row.seq) if self._is_last else None
        row.compute_end_s = self.trace.enter(StagePhase.SENDING)
        row.bytes_sent = self._send(x_TH)
        row.sent_s = self.trace.now()
        self.trace.complete(row)
        return result

    def compute(self, x_TH: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """This stage's layers over the whole batch."""
        if batch.graph is not None and self._graphs is not None:
            x_TH = self._graphs.run(x_TH, batch.graph)
            self.look_ahead()
            return x_TH
        cache = self._cache
        assert cache is not None, "an epoch has begun"
        return self._decoder.forward(
            x_TH,
            batch.positions_T,
            cache,
            batch.context,
            on_layer=self._enter_layer,  # a long prompt isn't a hang
        )

    @property
    def is_over(self) -> bool:
        """end() was called."""
        return self._over.is_set()

    def end(self) -> None:
        """The epoch is over. From any thread; what is being computed stops at the next layer.

        What the device waits for in the links is aborted, or it could not go on to the next epoch.
        """
        self._over.set()
        self._abort_links()

    def close(self) -> None:
        """Give up the links: a neighbour that waits at the other end hears of it."""
        self._abort_links()
        for channel in (self._previous, self._next, *self._made):
            if channel is not None:
                channel.close()

    def _abort_links(self) -> None:
        """All of them before any is closed: they may wait for each other."""
        for channel in list(self._made):
            channel.abort()

    def _enter_layer(self) -> float:
        if self._over.is_set():
            raise EpochOver
        self.look_ahead()
        return self.trace.enter(StagePhase.COMPUTING)

    @property
    def _is_last(self) -> bool:
        return self._setup.stage == self._setup.num_stages - 1

    def _post_recv(self, batch: PackedBatch) -> tuple[torch.Tensor | None, Arrival | None]:
        """On the inbound stream: what is being computed has no part in it."""
        if self._previous is None:
            return None, None
        with self._device.inbound():
            x_TH = self._room(batch)
            return x_TH, self._previous.post_recv(x_TH)

    def _room(self, batch: PackedBatch) -> torch.Tensor:
        """For what the stage before sends; the plan says how much."""
        shape = (batch.num_rows, self._spec.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self._device.torch_device)

    def _input(self, iteration: Iteration) -> torch.Tensor:
        """The first stage embeds tokens, the others wait for theirs."""
        self.trace.enter(StagePhase.RECEIVING)
        iteration.batch.tables.wait()
        if iteration.x_TH is None or iteration.arrival is None:
            return self._decoder.embed(iteration.batch.token_ids_T)
        iteration.arrival.wait()
        self._device.hold(iteration.x_TH)
        return iteration.x_TH

    def _send(self, x_TH: torch.Tensor) -> int:
        if self._next is None:
            return 0
        before = self._next.bytes_sent
        self._next.send(x_TH)
        return self._next.bytes_sent - before

    # ---- the last stage's end ------------------------------------------

    def _sample(self, x_TH: torch.Tensor, batch: PackedBatch, seq: int) -> Result:
        """Head on the rows that need it, then one token an entry.

        Nothing but tokens comes to the host, and what logits were asked for.
        """
        if not batch.sampled:
            return Result(seq=seq)
        logits_RV = self._decoder.logits(x_TH[batch.sampled_rows_R])
        among_RV = logits_RV[:, : self._setup.num_token_ids or None]
        tokens_E = self._kernels.sample(among_RV, batch.parameters_EP)
        wanted = asked_for(batch.sampled, logits_RV)
        self.trace.enter(StagePhase.AWAITING)
        tokens_E, *wanted = download(self._device, [tokens_E, *wanted])
        return result_of(seq, batch.sampled, tokens_E.tolist(), wanted)
