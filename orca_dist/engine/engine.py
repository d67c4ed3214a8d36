"""The engine as a whole: settles the configuration, builds the parts, proves them, ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orca_dist.config import (
    DeviceKind,
    EngineConfig,
    Launcher,
    LoadFormat,
    LogConfig,
    LogLevel,
    Switch,
)
from orca_dist.core import Output, Request
from orca_dist.engine.local_pipeline import LocalPlacement
from orca_dist.engine.master import Deliver, EngineLoad, EngineMaster, Lose, Pause
from orca_dist.engine.pipeline import Pipeline
from orca_dist.engine.placing import passed_environment
from orca_dist.engine.ray_logs import plain_logs
from orca_dist.engine.settle import cpus_per_stage, settle, settle_max_model_len
from orca_dist.engine.stages import OnLoad, OnProgress, PipelineConfig, Placement, StageStatus
from orca_dist.engine.supervisor import Supervisor
from orca_dist.engine.trace import TraceLog
from orca_dist.errors import OrcaError, StartupError
from orca_dist.metrics.trace import PlanTrace
from orca_dist.scheduling import make_scheduler
from orca_dist.spec import ModelSpec, load_spec
from orca_dist.weights.source import check_source, source_name, source_of

log = logging.getLogger(__name__)

QUIET = LogConfig(log_level=LogLevel.WARNING)
SWITCH_INTERVAL_S = 0.0005  # the master's thread must not wait 5 ms for the front's


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What `info` shows."""

    model: str
    name: str
    stages: tuple[StageStatus, ...]
    epoch: int
    max_model_len: int
    kv_tokens: int


class Engine:
    """Made by start(); submit, cancel and finish are thread-safe and return at once."""

    def __init__(
        self, *, spec: ModelSpec, config: EngineConfig, pipeline: Pipeline, max_model_len: int
    ) -> None:
        settled = pipeline.config
        self.spec = spec
        self.config = config
        self.max_model_len = max_model_len
        self.kv_tokens = pipeline.num_blocks * settled.block_size
        self._pipeline = pipeline
        self._trace = TraceLog(settled.num_stages)
        self._master = EngineMaster(
            scheduler=make_scheduler(
                config,
                num_blocks=pipeline.num_blocks,
                refuse_late=config.refuse_late is Switch.ON,
            ),
            pipeline=pipeline,
            supervisor=Supervisor(
                num_stages=settled.num_stages,
                heartbeat_s=config.heartbeat_s,
                step_limit_s=config.step_limit_s,
                now=time.monotonic(),
            ),
            trace=self._trace,
            recovery_timeout_s=config.recovery_timeout_s if config.recovery is Switch.ON else None,
        )
        self._closed = False

    @classmethod
    def start(
        cls,
        model: Path,
        config: EngineConfig,
        *,
        num_token_ids: int | None = None,
        log_config: LogConfig = QUIET,
        on_progress: OnProgress | None = None,
        on_load: OnLoad = lambda done, total: None,
        placement: Placement | None = None,
    ) -> Engine:
        """Blocks until a warm-up request has passed all stages.

        Raises ModelError, ConfigError or StartupError; nothing is left running then.
        `num_token_ids`: how many ids the tokenizer has; the rows of a padded head beyond
        them are never sampled. `log_config` is how the stages log; `placement` replaces
        the launcher's own (tests bring stages with delays).
        """
        spec = load_spec(model)
        source = source_of(model)
        max_model_len = settle_max_model_len(spec, config)
        settled = settle(source, spec, config, log_config, num_token_ids=num_token_ids)
        if config.load_format is not LoadFormat.DUMMY:
            check_source(model, spec)
        on_progress = on_progress or log.info
        with contextlib.ExitStack() as undo:
            placement = placement or _placement(config, settled)
            undo.callback(placement.close)
            pipeline = Pipeline(settled, placement)
            undo.callback(pipeline.close)
            times = pipeline.start(on_progress, on_load)
            log.info("%s", kv_told(pipeline.num_blocks * config.block_size, max_model_len))
            engine = cls(spec=spec, config=config, pipeline=pipeline, max_model_len=max_model_len)
            undo.callback(engine.close)
            on_progress("warming up")
            began_s = time.monotonic()
            engine._warm_up()
            log.info("start: %s, warm up %.1f s", times, time.monotonic() - began_s)
            undo.pop_all()
        return engine

    def attach(self, *, deliver: Deliver, lose: Lose, pause: Pause = lambda paused: None) -> None:
        """The one front: outputs of each iteration, the loss of the pipeline, and whether it
        pauses for a recovery.

        All are called on the master's thread.
        """
        self._master.attach(deliver=deliver, lose=lose, pause=pause)

    def submit(self, request: Request) -> None:
        self._master.submit(request)

    def cancel(self, request_id: int) -> None:
        self._master.cancel(request_id)

    def finish(self, request_id: int, num_tokens: int) -> None:
        self._master.finish(request_id, num_tokens)

    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self._pipeline.config.model,
            name=source_name(self._pipeline.config.model),
            stages=tuple(replace(stage) for stage in self._pipeline.stages),
            epoch=self._pipeline.epoch,
            max_model_len=self.max_model_len,
            kv_tokens=self.kv_tokens,
        )

    def load(self) -> EngineLoad:
        """Requests, plans and KV slots in use, after all calls made before."""
        return self._master.load()

    def trace(self) -> list[PlanTrace]:
        """Plans that have returned with their rows of all stages, warm-up included."""
        return self._trace.snapshot()

    def flush_trace(self, timeout_s: float = 5.0) -> bool:
        """Waits until the stages' newest rows are in trace(); False where they did not come."""
        return self._master.flush_trace(timeout_s)

    def close(self) -> None:
        """Ends live requests, then all stages. Any number of times."""
        if self._closed:
            return
        self._closed = True
        self._master.close()
        self._pipeline.close()

    def _warm_up(self) -> None:
        """A real request of two tokens through all stages; its id 0 is never a caller's."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        news: queue.SimpleQueue[Sequence[Output] | OrcaError] = queue.SimpleQueue()
        max_tokens = min(2, min(self.max_model_len, self.kv_tokens) - 1)
        self._master.start()
        self.attach(deliver=news.put, lose=news.put)
        self._master.submit(Request(id=0, prompt=(0,), max_tokens=max_tokens))
        _await_end(news, self._pipeline.config.start_timeout_s)
        self.attach(deliver=lambda outputs: None, lose=lambda error: None)


def kv_told(kv_tokens: int, max_model_len: int) -> str:
    """Room for keys and values, in tokens and in requests."""
    return (
        f"KV: {kv_tokens} tokens, {kv_tokens / max_model_len:.1f} requests of the maximum length "
        f"of {max_model_len}"
    )


def _await_end(news: queue.SimpleQueue[Sequence[Output] | OrcaError], timeout_s: float) -> None:
    while True:
        try:
            item = news.get(timeout=timeout_s)
        except queue.Empty:
            raise StartupError(f"the warm-up did not come back within {timeout_s:g} s") from None
        if isinstance(item, OrcaError):
            raise StartupError(f"the warm-up failed: {item}")
        for output in item:
            if output.message:
                raise StartupError(f"the warm-up failed: {output.message}")
            if output.reason:
                return


def _placement(config: EngineConfig, settled: PipelineConfig) -> Placement:
    if config.launcher is Launcher.LOCAL:
        return LocalPlacement()
    with plain_logs():
        from orca_dist.engine.ray_pipeline import RayConfig, RayPlacement

    return RayPlacement(
        RayConfig(
            address=config.ray_address,
            num_cpus=cpus_per_stage(config),
            num_gpus=1 if settled.device == DeviceKind.CUDA else 0,
            num_stages=settled.num_stages,
            place_timeout_s=config.start_timeout_s,
            environment=passed_environment(os.environ, config.pass_env),
        )
    )
