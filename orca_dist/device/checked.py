"""A device that runs on the CPU and checks that its user waits for what has to be waited for.

Every operation is done at once, so results are right whatever is forgotten. What a GPU would
have promised is kept beside it: vector clocks of streams, and who used which buffer when. A fault
is a read of what may still be being written, a write to what may still be in use, memory dropped
while it is, an operation on tensors of both host and device, and one that makes the caller wait.
What is captured is done anew at each replay, and has to come to the same operations on the same
memory as the first time, none of it the host's; a replay spoils what was returned before.

For tests; no setting chooses it. Operations are seen through torch's dispatcher, so kernels have
to be torch's; numpy() and tolist() are seen in inference mode only, in which stages run. What was
made before `watching()` counts as the device's, and as ready.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orca_dist.device.clocks import Access, Actor, Buffer, Clock, Clocks
from orca_dist.device.seam import Work

COMPUTE, INBOUND, OUTBOUND = STREAMS = ("compute", "inbound", "outbound")
COPY, COPIES = "aten::copy_", {"aten::copy_", "aten::_to_copy"}
LIFT = "aten::lift_fresh"  # a tensor was made of Python numbers
LOOKS = {"aten::resolve_neg"}  # a view by name, but numpy() and tolist() read through it
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
WAITS |= {"aten::equal", "aten::masked_select"} | LOOKS

Tensors = Sequence[torch.Tensor]


class OrderFault(Exception):
    """Something was used before what it has to come after."""


class Trace:
    """What a captured piece of work comes to: its operations, and on which memory that it found."""

    def __init__(self) -> None:
        self.operations: list[tuple[object, ...]] = []
        self._made: set[int] = set()

    def note(self, name: str, given: Any, results: Tensors) -> None:
        """`given`: the operation's arguments. What it made is the work's own, wherever it lies."""
        leaves = tree_leaves(given)
        self.operations.append((name, *map(self._told, leaves)))
        found = {_key(tensor) for tensor in _tensors(leaves)}
        self._made |= {_key(tensor) for tensor in results} - found

    def _told(self, leaf: Any) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_mkldnn:
            return id(leaf)
        where = None if _key(leaf) in self._made else _key(leaf)
        return (where, leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype)


class _Local(threading.local):
    """Of one thread. Python gives a dead thread's number to another; this one is its own."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.thread: Actor = f"thread {next(numbers)}"
        self.stream: Actor = COMPUTE
        self.is_unwatched = False
        self.trace: Trace | None = None


class CheckedEvent:
    """What a stream or a link had been given, and what that came after."""

    def __init__(self, device: CheckedDevice, clock: Clock) -> None:
        self._device = device
        self._clock = clock

    def wait(self) -> None:
        self._device.clocks.learn(self._device.stream, self._clock)

    def synchronize(self) -> None:
        self._device.clocks.learn(self._device.thread, self._clock)


class CheckedDevice:
    """One device of one stage. A fault is raised, and again when watching() ends."""

    torch_device = torch.device("cpu", 0)  # the host's has no index
    is_host = False
    free_bytes = 0
    host_bytes = 0

    def __init__(self) -> None:
        self.clocks = Clocks()
        self._buffers: dict[int, Buffer] = {}
        self._faults: list[str] = []
        self._captured: list[torch.Tensor] = []  # what each replay returns
        self._local = _Local(count())
        self._lock = threading.RLock()

    # ---- the seam ------------------------------------------------------

    def inbound(self) -> AbstractContextManager[None]:
        return self._on(INBOUND)

    def outbound(self) -> AbstractContextManager[None]:
        return self._on(OUTBOUND)

    def record(self) -> CheckedEvent:
        self.clocks.learn(self.stream, self.clocks.of(self.thread))
        return CheckedEvent(self, self.clocks.of(self.stream))

    def hold(self, tensor: torch.Tensor) -> None:
        self._buffer(tensor).holders.add(self.stream)

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self._adopt(tensor, Buffer(home=None, is_pinned=True))
        return tensor

    def capture(self, work: Work) -> Work:
        returned, captured = self._traced(work)
        self._captured.append(returned)

        def replay() -> torch.Tensor:
            for each in self._captured:
                each.fill_(torch.nan if each.is_floating_point() else -1)
            result, again = self._traced(work)
            if again.operations != captured.operations:
                self._fail("a replay would not do what the work does now")
            return returned.copy_(result)

        return replay

    def _traced(self, work: Work) -> tuple[torch.Tensor, Trace]:
        trace = self._local.trace = Trace()
        try:
            return work(), trace
        finally:
            self._local.trace = None

    # ---- for tests, and for links that follow it -----------------------

    @property
    def stream(self) -> Actor:
        """This thread's current one."""
        return self._local.stream

    @property
    def thread(self) -> Actor:
        return self._local.thread

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it this thread's operations are checked."""
        with _Watch(self):
            yield
        self.check()

    def check(self) -> None:
        """Raises OrderFault for any fault so far: some happen where nobody can be told."""
        if self._faults:
            raise OrderFault(self._faults[0])

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Within it this thread plays the part of others, and is not checked."""
        before, self._local.is_unwatched = self._local.is_unwatched, True
        try:
            yield
        finally:
            self._local.is_unwatched = before

    def use(
        self, actor: Actor, what: str, *, reads: Tensors = (), writes: Tensors = ()
    ) -> CheckedEvent:
        """A piece of a stream's or link's work, which this thread begins; the event is its end."""
        with self._lock:
            self._begin(actor, what, reads, writes)
            return CheckedEvent(self, self.clocks.of(actor))

    # ---- operations ----------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One of torch's: done at once, and noted as the work of whoever would do it."""
        if self._local.is_unwatched:
            return func(*args, **kwargs)
        with self._lock:
            name, tensors = func._schema.name, _tensors((args, kwargs))
            if name == LIFT:
                self._adopt(tensors[0], Buffer(home=None))
            if func.is_view and name not in LOOKS:
                return self._noted(name, (args, kwargs), func(*args, **kwargs))
            is_ours = kwargs.get("device") == self.torch_device or any(map(self._is_ours, tensors))
            writes, access = _written(func, args, kwargs), None
            if is_ours:
                self._expect_no_wait(name, tensors, args)
                read = [each for each in tensors if each.dim() or self._is_ours(each)]
                access = self._begin(self.stream, name, read, writes)
            elif self._local.trace is not None:
                self._fail(f"{name} on the host is not captured")
            else:
                self._run_on_host(name, tensors, writes)
            result = self._noted(name, (args, kwargs), func(*args, **kwargs))
            self._own_new(_tensors(result), access)
            return result

    def _noted(self, name: str, given: Any, result: Any) -> Any:
        """In what is being captured. A view may be a copy where that is needed."""
        if self._local.trace is not None:
            self._local.trace.note(name, given, _tensors(result))
        return result

    def _begin(self, actor: Actor, what: str, reads: Tensors, writes: Tensors) -> Access:
        """Work that goes on behind this thread, which knows what comes before it."""
        self.clocks.learn(actor, self.clocks.of(self.thread))
        self._expect_order(actor, what, reads, writes)
        access = self.clocks.begin(actor, what)
        for tensor in reads:
            self._buffer(tensor).add_read(access)
        for tensor in writes:
            self._buffer(tensor).add_write(access)
        return access

    def _run_on_host(self, what: str, reads: Tensors, writes: Tensors) -> None:
        """Work that is over when it returns: nobody has to wait for it."""
        self._expect_order(self.thread, what, reads, writes)
        for tensor in writes:
            self._buffer(tensor).add_write(None)

    def _expect_order(self, actor: Actor, what: str, reads: Tensors, writes: Tensors) -> None:
        """Raises OrderFault where the actor doesn't know of what it has to come after."""
        used = [use for tensor in writes for use in self._buffer(tensor).uses]
        used += [use for tensor in reads for use in self._buffer(tensor).writes]
        for use in used:
            if not self.clocks.knows(actor, use):
                self._fail(f"{what} on {actor} uses a buffer that {use} may still be using")

    def _expect_no_wait(self, name: str, tensors: Tensors, args: tuple[Any, ...]) -> None:
        """Raises OrderFault for what a GPU refuses, and for what makes its caller wait."""
        on_host = [tensor for tensor in tensors if not self._is_ours(tensor)]
        if on_host and self._local.trace is not None:
            self._fail(f"{name} takes a tensor of the host's, and would not see it change")
        is_copy = name in COPIES and bool(on_host)
        is_async = (
            is_copy and name == COPY and args[2:] == (True,) and self._buffer(on_host[0]).is_pinned
        )
        if name in WAITS or (is_copy and not is_async):
            self._fail(f"{name} makes the caller wait for the device")
        if not is_copy and any(tensor.dim() for tensor in on_host):
            self._fail(f"{name} takes tensors of the host's and of the device's")

    def _fail(self, message: str) -> None:
        self._faults.append(message)
        raise OrderFault(message)

    # ---- memory --------------------------------------------------------

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return self._buffer(tensor).home is not None

    def _buffer(self, tensor: torch.Tensor) -> Buffer:
        key = _key(tensor)
        if key not in self._buffers:
            self._adopt(tensor, Buffer(home=COMPUTE))
        return self._buffers[key]

    def _own_new(self, tensors: Tensors, access: Access | None) -> None:
        """What an operation made: memory of the current stream's, or of the host's."""
        home = self.stream if access else None
        for tensor in tensors:
            if _key(tensor) not in self._buffers:
                self._adopt(tensor, Buffer(home=home, write=access))

    def _adopt(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata not in self._buffers:
                weakref.finalize(storage, self._drop, storage._cdata).atexit = False
            self._buffers[storage._cdata] = buffer

    def _drop(self, key: int) -> None:
        """Its memory may be given to others now; nobody who is asked may be unaware of a use."""
        with self._lock:
            buffer = self._buffers.pop(key)
            asked = {self.thread, *buffer.holders} | ({buffer.home} if buffer.home else set())
            for use in buffer.uses:
                is_torchs = buffer.is_pinned and use.actor in STREAMS
                if not is_torchs and not any(self.clocks.knows(actor, use) for actor in asked):
                    self._faults.append(f"memory was dropped that {use} may still be using")

    @contextmanager
    def _on(self, stream: Actor) -> Iterator[None]:
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before


class _Watch(TorchDispatchMode):
    """Shows a thread's operations to a device."""

    def __init__(self, device: CheckedDevice) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's compiler takes seconds to import."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._device.run(func, args, kwargs or {})


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[torch.Tensor]:
    """All but weights that are packed for oneDNN: nothing writes them, and they have no storage."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if not tensor.is_mkldnn]


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to, by its schema."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors(written)
