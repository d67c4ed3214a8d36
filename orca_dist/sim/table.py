"""What an iteration costs as it was measured: a table that `orca-dist profile` writes.

A stage's time is a sum of four piecewise linear functions, each given by its
points [x, seconds] in ascending order of x, and going on beyond the last two in
the same line:

    tokens(T)     of the batch's tokens: everything that is done to each row
    sampled(S)    of the rows that sample: the head and the sampler (last stage)
    context(C)    of the KV slots that are read, each request's once
    attended(A)   of the slots that all tokens attend to, summed over the tokens

The file:

    {"schema": 1, "model": "...", "device": "...",
     "stages": [{"layers": 15, "tokens": [[1, 0.004], [512, 0.2]],
                 "sampled": [[0, 0], [32, 0.01]], "context": [[0, 0], [4096, 0.004]],
                 "attended": [[0, 0], [4096, 0.001]]}, ...],
     "link": [[1, 0.0002], [512, 0.002]],         seconds by rows, from a stage to the next
     "plan_latency_s": 0.0005, "token_latency_s": 0.0005,
     "kv_tokens": 100000}

`sampled`, `context`, `attended`, `link`, both latencies and `kv_tokens` may be absent: they
are 0, and kv_tokens as much as is needed.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orca_dist.core import Plan
from orca_dist.errors import ConfigError
from orca_dist.sim.batch import BatchShape, batch_shape
from orca_dist.sim.pipeline import ControlLatency, PlanTimes

SCHEMA = 1
NAMES = {
    "schema",
    "model",
    "device",
    "stages",
    "link",
    "plan_latency_s",
    "token_latency_s",
    "kv_tokens",
}
STAGE_NAMES = {"layers", "tokens", "sampled", "context", "attended"}


class Curve:
    """Piecewise linear through points; constant if there is but one."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        self._xs = [x for x, _ in points]
        self._ys = [y for _, y in points]

    def __call__(self, x: float) -> float:
        """Below the first point as at the first; never negative."""
        xs, ys = self._xs, self._ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        high = min(bisect_right(xs, x), len(xs) - 1)
        low = high - 1
        slope = (ys[high] - ys[low]) / (xs[high] - xs[low])
        return max(0.0, ys[low] + slope * (x - xs[low]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCurves:
    """One stage's four."""

    tokens: Curve
    sampled: Curve
    context: Curve
    attended: Curve

    def seconds(self, batch: BatchShape) -> float:
        """What the stage takes for a batch."""
        return (
            self.tokens(batch.num_tokens)
            + self.sampled(batch.num_sampled)
            + self.context(batch.context)
            + self.attended(batch.attended)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The Cost of a measured pipeline."""

    stages: tuple[StageCurves, ...]
    link: Curve
    latency: ControlLatency
    kv_tokens: int | None

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def times(self, plan: Plan) -> PlanTimes:
        batch = batch_shape(plan)
        stage_s = [stage.seconds(batch) for stage in self.stages]
        return PlanTimes(stage_s, self.link(batch.num_tokens))


def read_cost_table(path: Path) -> CostTable:
    """Raises ConfigError naming the file and the place in it that is wrong."""
    document = _document(path)
    _check_names(str(path), document, NAMES)
    if document.get("schema") != SCHEMA:
        raise ConfigError(
            f"{path}: schema = {document.get('schema')!r}: needs {SCHEMA}; make the table again "
            "with this version's orca-dist profile"
        )
    stages = document.get("stages")
    if not isinstance(stages, list) or not stages:
        raise ConfigError(f"{path}: stages: needs a list of at least one stage")
    return CostTable(
        stages=tuple(
            _stage(f"{path}: stages[{index}]", values) for index, values in enumerate(stages)
        ),
        link=_curve(f"{path}: link", document.get("link", [[0, 0]])),
        latency=ControlLatency(
            plan_s=_number(f"{path}: plan_latency_s", document.get("plan_latency_s", 0)),
            token_s=_number(f"{path}: token_latency_s", document.get("token_latency_s", 0)),
        ),
        kv_tokens=_kv_tokens(path, document.get("kv_tokens")),
    )


def _document(path: Path) -> Mapping[str, object]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as a cost table: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: needs a JSON object; orca-dist profile writes one")
    return document


def _check_names(where: str, values: Mapping[str, object], known: set[str]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{where}: {name}: no such name; choose from {', '.join(sorted(known))}"
            )


def _stage(where: str, values: object) -> StageCurves:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: needs an object with {', '.join(sorted(STAGE_NAMES))}")
    _check_names(where, values, STAGE_NAMES)
    curves = StageCurves(
        tokens=_curve(f"{where}: tokens", values.get("tokens")),
        sampled=_curve(f"{where}: sampled", values.get("sampled", [[0, 0]])),
        context=_curve(f"{where}: context", values.get("context", [[0, 0]])),
        attended=_curve(f"{where}: attended", values.get("attended", [[0, 0]])),
    )
    if curves.tokens(1) <= 0:
        raise ConfigError(f"{where}: tokens: one token takes no time; measure it again")
    return curves


def _curve(where: str, value: object) -> Curve:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} = {value!r}: needs points [[x, seconds], ...]")
    points = [_point(f"{where}[{index}]", item) for index, item in enumerate(value)]
    xs = [x for x, _ in points]
    if sorted(set(xs)) != xs:
        raise ConfigError(f"{where}: x has to rise from point to point")
    return Curve(points)


def _point(where: str, value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{where} = {value!r}: needs [x, seconds]")
    return _number(where, value[0]), _number(where, value[1])


def _number(where: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{where} = {value!r}: needs a number")
    if not 0 <= value < math.inf:
        raise ConfigError(f"{where} = {value!r}: needs 0 or more, and finite")
    return float(value)


def _kv_tokens(path: Path, value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 2:
        raise ConfigError(f"{path}: kv_tokens = {value!r}: needs a whole number of at least 2")
    return value
