"""`orca-dist bench kernels`: the CPU kernels beside what they replace."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from orca_dist.cli.output import count_progress, print_json
from orca_dist.cli.settings import DEFAULT_MODEL
from orca_dist.config import MAX_CPUS, Dtype, LogConfig
from orca_dist.errors import ConfigError
from orca_dist.spec import load_spec

if TYPE_CHECKING:
    from orca_dist.bench.kernels import KernelRow, Times

DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchKernels:
    """Time each CPU kernel and its reference in torch, taking turns, on batches of typical shapes.

    Medians, with the quartiles around them.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder, of which only the sizes are read; or the default model's name."""
    kernels: tuple[str, ...] = ()
    """Kernels to time; by default all."""
    dtypes: tuple[str, ...] = DTYPES
    """Of the inputs: float32, bfloat16."""
    threads: tuple[int, ...] = (1,)
    """Threads that both sides may use, rows for each number."""
    rounds: int = 15
    """Samples of each side, in turn."""
    json: bool = False
    """Print one JSON document instead."""

    def run(self, log: LogConfig) -> int:
        from orca_dist.bench.kernels import KERNELS, measure
        from orca_dist.llm import resolve_model

        self._check(tuple(KERNELS))
        spec = load_spec(resolve_model(self.model))
        with count_progress("rows") as on_progress:
            rows = measure(
                spec,
                kernels=self.kernels or tuple(KERNELS),
                dtypes=self.dtypes,
                threads=self.threads,
                rounds=self.rounds,
                on_progress=on_progress,
            )
        if self.json:
            print_json({"rows": [dataclasses.asdict(row) for row in rows]})
        else:
            print("\n".join([_head(), *map(_line, rows)]))
        return 0

    def _check(self, known: tuple[str, ...]) -> None:
        for name, words, choices in (
            ("kernels", self.kernels, known),
            ("dtypes", self.dtypes, DTYPES),
        ):
            for word in words:
                if word not in choices:
                    raise ConfigError(f"{name} = {word}: choose of {', '.join(choices)}")
        for num in self.threads:
            if not 1 <= num <= MAX_CPUS:
                raise ConfigError(f"threads = {num}: must be at least 1 and at most {MAX_CPUS}")
        if self.rounds < 1:
            raise ConfigError(f"rounds = {self.rounds}: must be at least 1")


def _head() -> str:
    return (
        f"{'kernel':18}{'shape':18}{'dtype':10}{'threads':>7}{'kernel us':>24}"
        f"{'reference us':>26}{'ratio':>7}"
    )


def _line(row: KernelRow) -> str:
    return (
        f"{row.kernel:18}{row.shape:18}{row.dtype:10}{row.threads:>7}{_cell(row.kernel_us):>24}"
        f"{_cell(row.reference_us):>26}{row.ratio:>7.1f}"
    )


def _cell(times: Times) -> str:
    return f"{times.median:.0f} ({times.low:.0f}-{times.high:.0f})"
