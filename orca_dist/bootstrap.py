"""The little that a stage is told before it can ask: whom to call, and the run's secret."""

from __future__ import annotations

from dataclasses import dataclass, field

from orca_dist.config import LogConfig, LogFormat, LogLevel

SECRET_HEADER = "orca-run-secret-bin"  # of the call that opens a control stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBootstrap:
    """`control_address` is the engine master's host:port; `secret` proves the run.

    `host` is the stage's own address on the cluster network; empty: its launcher fills it in.
    `environment` is set before the stage imports anything large; `num_gpus` are to be its own, and
    `gpus`, which its launcher fills in, are their ids on the node.
    """

    stage: int
    control_address: str
    secret: str = field(repr=False)
    host: str = ""
    environment: dict[str, str] = field(default_factory=dict, repr=False)  # tokens of the Hub, too
    num_gpus: int = 0
    gpus: tuple[str, ...] = ()
    log_level: LogLevel = LogLevel.WARNING
    log_format: LogFormat = LogFormat.TEXT

    @property
    def log(self) -> LogConfig:
        """How the stage logs: as its master does."""
        return LogConfig(log_level=self.log_level, log_format=self.log_format)
