"""`orca-dist doctor`: what a machine or cluster lacks for a server, before one starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.output import count_progress, print_json, results_only
from orca_dist.cli.settings import API_KEYS_VARIABLE, DEFAULT_MODEL
from orca_dist.config import EngineConfig, LogConfig, ServerConfig
from orca_dist.errors import ConfigError, StartupError
from orca_dist.logs import Origin, set_up_logging

if TYPE_CHECKING:
    from orca_dist.doctor import Finding, Nodes, Question, Report, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Examine this machine, or every node of the cluster at --ray-address, for a server.

    Takes the flags of serve and starts nothing: put doctor in the place of serve, on the machine
    where serve is to run. Each check says pass, warn or fail, what was seen, and what to do. The
    exit code is 1 if any fails.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Model folder or id of the Hub (org/name); or the default model. Nothing is fetched."""
    config: Path | None = None
    """YAML file of settings, keys as the flags below; flags win over it."""
    json: bool = False
    """Print one JSON document instead."""
    engine: OmitArgPrefixes[EngineConfig]
    server: OmitArgPrefixes[ServerConfig]
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        """Returns 1 if a check fails; raises ConfigError for settings that serve would refuse."""
        from orca_dist.cli.doctor_tables import document, print_report
        from orca_dist.doctor import with_finding

        self.engine.check()
        self.server.check()
        set_up_logging(self.log, Origin())
        with results_only():
            report = _report(self)
        report = with_finding(report, _access(self.server, node=report.nodes[0].node))
        if self.json:
            print_json(document(report))
        else:
            print_report(report)
        return 1 if report.verdict == "fail" else 0


def _access(server: ServerConfig, *, node: str) -> Finding:
    """Whether serve would let its callers in, and nobody else; it is to run on this node."""
    from orca_dist.doctor import Check, failed, passed, warned
    from orca_dist.server.listener import check_access

    try:
        problem = check_access(server, os.environ.get(API_KEYS_VARIABLE, ""))
    except ConfigError as error:
        return failed(Check.ACCESS, str(error), "serve refuses to start like that", node=node)
    if problem:
        remedy = "--allow-insecure on lets them; see docs/security.md"
        return warned(Check.ACCESS, problem, remedy, node=node)
    seen = f"keys and certificates fit, strangers stay out of {server.host}"
    return passed(Check.ACCESS, seen, node=node)


def _report(command: Doctor) -> Report:
    from orca_dist.doctor import (
        demand_of,
        examine,
        need_of,
        source_of_model,
        without_cluster,
    )

    source = source_of_model(command.model, command.engine)
    need = need_of(source, command.engine)
    demand = demand_of(command.engine)
    question = _question(command, source, wants_cuda=demand.on_gpu)
    with count_progress("examining") as on_progress:
        try:
            with _nodes(command.engine.ray_address) as nodes:
                return examine(nodes, question, demand, need, on_progress)
        except StartupError as error:  # no such cluster
            with _nodes("") as nodes:
                alone = examine(nodes, question, demand, need, on_progress)
            return without_cluster(alone, str(error))


def _question(command: Doctor, source: Source, *, wants_cuda: bool) -> Question:
    from orca_dist.doctor import Question

    return Question(
        source=source,
        host=command.server.host,
        port=command.server.port,
        wants_cuda=wants_cuda,
    )


@contextlib.contextmanager
def _nodes(ray_address: str) -> Iterator[Nodes]:
    """Those of the cluster, or this one."""
    if ray_address:
        from orca_dist.doctor.ray_nodes import connected

        with connected(ray_address) as nodes:
            yield nodes
        return
    from orca_dist.doctor import ThisNode

    with contextlib.closing(ThisNode()) as node:
        yield node
