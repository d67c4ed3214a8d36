"""`orca-dist cluster`: files to start a cluster with, and what such a file runs in a Slurm job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

from orca_dist.cli.settings import load_settings
from orca_dist.config import LogConfig
from orca_dist.logs import Origin, set_up_logging

CONFIG = Path("orca.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """Write what starts a cluster of a kind (k8s, ray, slurm) to a folder; overwrites nothing."""

    kind: Positional[str]
    """Kind of cluster: k8s, ray or slurm."""
    folder: Positional[Path]
    """Folder to write to; made if need be."""

    def run(self) -> int:
        from orca_dist.cli.templates import copy_template

        for path in copy_template(self.kind, self.folder):
            print(path)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """In a Slurm job: start a Ray of the job's own on its nodes, and serve on it.

    Ends with the exit code of `serve`; nothing of the job is left behind.
    """

    config: Path = CONFIG
    """YAML file of settings, as of `serve`."""
    network: str = ""
    """Network that the nodes' addresses are to be of, such as 10.1.0.0/16; by default what is
    in the settings, else the address that a node's name has."""

    def run(self) -> int:
        from orca_dist.cli.slurm_job import serve_on_job

        settings = load_settings(os.environ, self.config)
        network = self.network or settings.cluster.network
        return serve_on_job(self.config, settings, network)


ACTIONS: dict[str, type[Init] | type[Slurm]] = {"init": Init, "slurm": Slurm}
Action = Annotated[Init, subcommand("init")] | Annotated[Slurm, subcommand("slurm")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Start a cluster: its files, and what runs in a Slurm job."""

    action: OmitArgPrefixes[Action]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        set_up_logging(self.log, Origin())
        return self.action.run()
