"""The entry point: which command, with which settings, and the exit code it ends with.

Imports neither gRPC nor the engine; the commands do, when they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tyro

from orca_dist import __version__
from orca_dist.cli.bench import Bench
from orca_dist.cli.cluster import Cluster
from orca_dist.cli.doctor import Doctor
from orca_dist.cli.generate import Generate, SamplingFlags
from orca_dist.cli.info import Info
from orca_dist.cli.interrupts import Interrupted, handling, interrupt
from orca_dist.cli.model import Model
from orca_dist.cli.plan import Plan
from orca_dist.cli.profile import Profile
from orca_dist.cli.serve import Serve
from orca_dist.cli.settings import Settings, load_settings
from orca_dist.cli.sim_costs import CostFlags
from orca_dist.cli.sim_workloads import WorkloadFlags
from orca_dist.cli.simulate import Simulate
from orca_dist.cli.simulate_paper import SimulatePaper
from orca_dist.cli.usage import parse
from orca_dist.errors import OrcaError


class Command(Protocol):
    """A parsed command line."""

    def run(self) -> int:
        """The exit code; an OrcaError carries its own."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `arguments` (by default the process's own); returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        return ended(_print_version)
    _quiet_grpc()
    return ended(lambda: run(arguments, os.environ))


def _print_version() -> int:
    print(f"orca-dist {__version__}")
    return 0


def _quiet_grpc() -> None:
    """What gRPC's own core would print; read when it is imported, so set before that."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its errors reach us as exceptions
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # we only fork to exec


def ended(command: Callable[[], int]) -> int:
    """The exit code of `command`; what it raises becomes one line on stderr.

    1 at least where the reader of its output left before the end.
    """
    code = _code(command)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or 1
    return code


def _code(command: Callable[[], int]) -> int:
    try:
        with handling(interrupt):
            return command()
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as stop:
        return stop.exit_code
    except BrokenPipeError:  # the reader of our output has enough
        return 1


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """As main, but errors are raised."""
    settings = load_settings(environment, config_path(arguments))
    if tuple(arguments[:2]) == ("simulate", "paper"):
        arguments = ["simulate-paper", *arguments[2:]]
    command: Command | None = parse(commands(settings), arguments)
    return 0 if command is None else command.run()


def commands(settings: Settings) -> dict[str, Any]:
    """Every command, with `settings` as the defaults of its flags."""
    return {
        "serve": Serve(
            model=settings.model.model,
            config=settings.config,
            engine=settings.engine,
            server=settings.server,
            log=settings.log,
        ),
        "generate": Generate(
            sampling=SamplingFlags(),
            client=settings.client,
            access=settings.access,
            log=settings.log,
        ),
        "info": Info(client=settings.client, access=settings.access, log=settings.log),
        "model": Model(action=tyro.MISSING, log=settings.log),
        "profile": Profile(engine=settings.engine, log=settings.log),
        "bench": Bench(part=tyro.MISSING, log=settings.log),
        "cluster": Cluster(action=tyro.MISSING, log=settings.log),
        "simulate": Simulate(
            config=settings.config,
            workload=WorkloadFlags(),
            cost=CostFlags(),
            schedule=settings.schedule,
            log=settings.log,
        ),
        "simulate-paper": SimulatePaper(log=settings.log),
        "plan": Plan(log=settings.log),
        "doctor": Doctor(
            model=settings.model.model,
            config=settings.config,
            engine=settings.engine,
            server=settings.server,
            log=settings.log,
        ),
    }


def config_path(arguments: Sequence[str]) -> Path | None:
    """The file after --config: its values are defaults, so it is read before the flags are."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
        if argument == "--config" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
    return None
