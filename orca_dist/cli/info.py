"""`orca-dist info`: a server's stages, where they run, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes

from orca_dist.cli.connecting import connect
from orca_dist.cli.output import print_json
from orca_dist.cli.settings import AccessConfig, ClientConfig
from orca_dist.config import LogConfig
from orca_dist.logs import Origin, set_up_logging

if TYPE_CHECKING:
    from orca_dist.client import ServerInfo, StageInfo

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Show a server's model, its stages and its limits."""

    json: bool = False
    """Print one JSON document instead."""
    client: OmitArgPrefixes[ClientConfig]
    access: OmitArgPrefixes[AccessConfig]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        """Returns 0; raises the OrcaError that ended the call."""
        self.client.check()
        set_up_logging(self.log, Origin())
        with connect(self.client, self.access) as client:
            info = client.info(timeout_s=TIMEOUT_S)
        if self.json:
            print_json(_document(info))
        else:
            print("\n".join(_lines(info)))
        return 0


def _lines(info: ServerInfo) -> list[str]:
    head = (
        f"model {info.model}   epoch {info.epoch}   max_model_len {info.max_model_len}"
        f"   kv_tokens {info.kv_tokens}   orca-dist {info.version}"
    )
    return [head, *(_line(stage) for stage in info.stages)]


def _line(stage: StageInfo) -> str:
    where = f"actor {stage.actor_id}" if stage.actor_id else "local process"
    return (
        f"stage {stage.index}   {stage.state}   layers {stage.layers[0]}-{stage.layers[-1]}"
        f"   {stage.device}   {stage.node}   pid {stage.pid}   {where}"
    )


def _document(info: ServerInfo) -> dict[str, object]:
    return {
        "model": info.model,
        "stages": [_stage(stage) for stage in info.stages],
        "epoch": info.epoch,
        "max_model_len": info.max_model_len,
        "kv_tokens": info.kv_tokens,
        "version": info.version,
    }


def _stage(stage: StageInfo) -> dict[str, object]:
    """`layers` lists the layers' numbers."""
    return {
        "index": stage.index,
        "node": stage.node,
        "pid": stage.pid,
        "actor_id": stage.actor_id,
        "device": stage.device,
        "layers": list(stage.layers),
        "state": stage.state,
    }
