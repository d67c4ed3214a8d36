"""A stage's tensors by our names, each read when it is asked for.

What makes a model of them packs each matrix into another layout and has no more use for the one
that was read. Read one by one, they need no memory for a second copy of the stage's weights, and
the memory that one leaves takes the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch

ReadTensor = Callable[[str], torch.Tensor]


class LazyTensors(Mapping[str, torch.Tensor]):
    """Our name -> tensor. Ask once for each; what has two of our names is read once and kept."""

    def __init__(self, names: Mapping[str, str], read: ReadTensor) -> None:
        """`names`: ours -> Hugging Face's, which `read` takes."""
        self._names = names
        self._read = read
        self._num_uses = Counter(names.values())
        self._kept: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        theirs = self._names[name]
        if self._num_uses[theirs] == 1:
            return self._read(theirs)
        if theirs not in self._kept:
            self._kept[theirs] = self._read(theirs)
        return self._kept[theirs]

    def __contains__(self, name: object) -> bool:
        """Without reading it."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
