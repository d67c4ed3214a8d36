"""What the server needs of the engine: the seam that tests fill with a scripted one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from orca_dist.core import Output
from orca_dist.engine.streams import Master
from orca_dist.errors import PipelineLost
from orca_dist.spec import ModelSpec


class StageStatus(Protocol):
    """Where one stage runs, and whether it does."""

    @property
    def index(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def actor_id(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def layers(self) -> range: ...
    @property
    def state(self) -> str: ...


class EngineInfo(Protocol):
    """The pipeline as it stands, and the limits in force."""

    @property
    def model(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> Sequence[StageStatus]: ...
    @property
    def epoch(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...


class ServedEngine(Master, Protocol):
    """A started engine. `attach`'s callbacks are called from the engine's own thread."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...

    def attach(
        self,
        *,
        deliver: Callable[[Sequence[Output]], None],
        lose: Callable[[PipelineLost], None],
        pause: Callable[[bool], None],
    ) -> None: ...

    def info(self) -> EngineInfo: ...
