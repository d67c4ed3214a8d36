"""Kernels of the library, and a tape that keeps their calls: what a graph is on a GPU.

For a batch of few rows Python needs as long for a kernel's call as the kernel takes. What is done
to buffers that stay where they are can be recorded once and replayed: the library's kernels that
follow each other by a single call, torch's own operations one by one. A replay does to these
buffers what the work would do now, so long as the work asks no tensor for its values.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], torch.Tensor]  # on buffers that stay where they are
Step = Callable[[], object]

ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}


class _Recording(threading.local):
    """The tape that this thread's calls go to."""

    tape: Tape | None = None


_recording = _Recording()


class Kernel:
    """A function of the library that returns nothing; its arguments have these C types."""

    def __init__(self, library: ctypes.CDLL, name: str, *types: type[Any]) -> None:
        self._function = library[name]
        self._function.argtypes = types
        self._function.restype = None
        self._types = types
        self._by_words = ctypes.cast(library[f"{name}_by_words"], ctypes.c_void_p)

    def __call__(self, *given: float | None) -> None:
        tape = _recording.tape
        if tape is not None:
            tape.keep_call(self._by_words, [*map(_word, self._types, given)])
        self._function(*given)


class Call(ctypes.Structure):
    """As tape.cpp has it."""

    _fields_ = (("make", ctypes.c_void_p), ("words", ctypes.POINTER(ctypes.c_uint64)))


class Tape(TorchDispatchMode):
    """Records this thread's work while it is entered. All that is allocated is kept.

    Work that asks for a value raises RuntimeError.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._replay = library["orca_replay"]
        self._replay.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._replay.restype = None
        self.steps: list[Step] = []
        self._calls: list[Call] = []  # since the last step
        self._kept: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As torch does otherwise, for which it imports its compiler: more than a second."""
        return False

    def __enter__(self) -> Tape:
        _recording.tape = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _recording.tape = None
        self._end_calls()

    def keep_call(self, make: ctypes.c_void_p, words: Sequence[int]) -> None:
        self._calls.append(Call(make, (ctypes.c_uint64 * len(words))(*words)))

    @property
    def nbytes(self) -> int:
        """Of what the work allocated."""
        return sum(tensor.nbytes for tensor in self._kept)

    def replay(self) -> None:
        for step in self.steps:
            step()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = partial(func, *args, **(kwargs or {}))
        result, name = given(), func._schema.name
        if func._schema.is_mutable:
            self._add_step(given)
        elif not _is_view(result, args):
            if not isinstance(result, torch.Tensor):
                raise RuntimeError(f"{name} asks for values, which differ from replay to replay")
            self._kept.append(result)
            if name not in ALLOCATIONS:
                self._add_step(lambda: result.copy_(given()))
        return result

    def _add_step(self, step: Step) -> None:
        self._end_calls()
        self.steps.append(step)

    def _end_calls(self) -> None:
        if self._calls:
            calls = (Call * len(self._calls))(*self._calls)
            self.steps.append(partial(self._replay, calls, len(calls)))
            self._calls = []


def capture(library: ctypes.CDLL, work: Work) -> Work:
    """The same work; each time it is called it is replayed, and returns the same tensor."""
    tape = Tape(library)
    with tape:
        result = work()

    def replay() -> torch.Tensor:
        tape.replay()
        return result

    return replay


def _word(kind: type[Any], value: float | None) -> int:
    """As tape.h takes an argument of this C type."""
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value or 0) % 2**64


def _is_view(result: object, given: Sequence[object]) -> bool:
    """Of what was given, all of it: nothing was computed."""
    views = result if isinstance(result, list | tuple) else [result]
    storages = set(map(_storage, given)) - {None}
    return all(isinstance(each, torch.Tensor) and _storage(each) in storages for each in views)


def _storage(value: object) -> int | None:
    """Which one a tensor lies in; oneDNN's have none."""
    if not isinstance(value, torch.Tensor) or value.is_mkldnn:
        return None
    return value.untyped_storage()._cdata
