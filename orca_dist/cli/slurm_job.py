"""A Slurm job as its script sees it: one step for the head, one for the workers.

Each node runs `orca_dist.cli.slurm_node`, whose stdin and stdout are ours. A node says
`joined NAME` once its Ray is up, or `lost NAME`; when all have joined, the head is told to
serve; and a node whose stdin ends ends its Ray. So nobody has to be found or polled, and all
end when this process does, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from orca_dist.cli.interrupts import Interrupted, handling
from orca_dist.cli.settings import Settings
from orca_dist.cli.slurm import (
    OwnRay,
    SlurmJob,
    free_ports,
    job_folder,
    make_folder,
    node_address,
    own_addresses,
    read_job,
)
from orca_dist.cli.slurm_node import JOINED, LOST, SERVE
from orca_dist.config import Launcher
from orca_dist.errors import ConfigError, StartupError

LEAVE_TIMEOUT_S = 15.0
FIRST = asyncio.FIRST_COMPLETED
NODE_MODULE = "orca_dist.cli.slurm_node"

log = logging.getLogger(__name__)


def serve_on_job(config: Path, settings: Settings, network: str) -> int:
    """The exit code of the server; raises StartupError where nodes don't join in time."""
    _check(settings)
    job = read_job(os.environ)
    ray = own_ray(job, network)
    make_folder(ray.folder, anew=True)
    try:
        command = ServeCommand(config=config.resolve(), network=network)
        return asyncio.run(_run(job, ray, command, settings.engine.start_timeout_s))
    finally:
        shutil.rmtree(ray.folder, ignore_errors=True)


def _check(settings: Settings) -> None:
    """What would end the server is told before any node is asked."""
    settings.engine.check()
    settings.server.check()
    if settings.engine.launcher is not Launcher.RAY:
        raise ConfigError("launcher = local: stages of a Slurm job are Ray actors; leave it out")
    if settings.engine.ray_address:
        raise ConfigError(
            f"ray_address = {settings.engine.ray_address}: a Slurm job starts a Ray of its own; "
            "leave it out"
        )


def own_ray(job: SlurmJob, network: str) -> OwnRay:
    """Where this job's Ray is to be, as seen from the head, on which this process runs."""
    address = node_address(job.head, network, own_addresses())
    port, client_port, *_ = free_ports(job.job_id, address)
    folder = job_folder(job.job_id, tempfile.gettempdir())
    return OwnRay(address=address, port=port, client_port=client_port, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """What the nodes are told beside where the Ray is."""

    config: Path
    network: str


def step_command(job: SlurmJob, nodes: Sequence[str]) -> list[str]:
    """One task on each of `nodes`; one that ends leaves the others alone."""
    return [
        *("srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"),
        *(f"--nodelist={','.join(nodes)}", f"--cpus-per-task={job.cpus}"),
        *("--kill-on-bad-exit=0", "--wait=0"),
    ]


def node_command(ray: OwnRay, command: ServeCommand, *, head: bool) -> list[str]:
    """What one node runs."""
    words = [sys.executable, "-m", NODE_MODULE, "--address", ray.address, "--port", str(ray.port)]
    words += ["--folder", str(ray.folder), "--network", command.network]
    if head:
        words += ["--client-port", str(ray.client_port), "--serve", str(command.config)]
    return words


def step_environment(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Of both steps: what sbatch passed on, and a token without which this Ray lets nobody in.

    GPUs that were asked for as a number for the whole job are asked for by node, as a step has
    not all of the job's nodes.
    """
    theirs = {k: v for k, v in environment.items() if k not in ("SLURM_GPUS", "RAY_ADDRESS")}
    if "SLURM_GPUS" in environment and "SLURM_GPUS_ON_NODE" in environment:
        theirs["SLURM_GPUS_PER_NODE"] = environment["SLURM_GPUS_ON_NODE"]
    return theirs | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


class Roll:
    """Who of the job's nodes has joined; `done` once all have, or one can't."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.missing = list(nodes)
        self.lost = ""
        self.done = asyncio.Event()

    def hear(self, line: str) -> bool:
        """Whether `line` was a node's word; else it is for others to read."""
        word, _, node = line.strip().partition(" ")
        if word == JOINED and node in self.missing:
            self.missing.remove(node)
        elif word == LOST:
            self._lose(node)
        else:
            return False
        if self.lost or not self.missing:
            self.done.set()
        return True

    def check(self, timeout_s: float) -> None:
        """Raises StartupError naming who has not joined."""
        if self.lost:
            raise StartupError(f"Ray can't run on node {self.lost}; its reason is above")
        if self.missing:
            raise StartupError(
                f"nodes {', '.join(self.missing)} have not joined within {timeout_s:g} s: look at "
                "them (sinfo, the lines above), or raise start_timeout_s"
            )

    def _lose(self, node: str) -> None:
        if self.done.is_set():
            log.warning("node %s has lost its Ray; its stages are lost with it", node)
        else:
            self.lost = node


async def _run(job: SlurmJob, ray: OwnRay, command: ServeCommand, timeout_s: float) -> int:
    environment = step_environment(os.environ, secrets.token_hex(32))
    roll = Roll(job.nodes)
    log.info(
        "job %d: head %s at %s:%d, workers %s, folder %s",
        *(job.job_id, job.head, ray.address, ray.port, ", ".join(job.workers) or "none"),
        ray.folder,
    )
    async with contextlib.AsyncExitStack() as steps:
        head = await _start(job, [job.head], node_command(ray, command, head=True), environment)
        steps.push_async_callback(head.leave)
        readers = [asyncio.create_task(head.read(roll))]
        if job.workers:
            line = node_command(ray, command, head=False)
            workers = await _start(job, job.workers, line, environment)
            steps.push_async_callback(workers.leave)
            readers.append(asyncio.create_task(workers.read(roll)))
        return await _until_the_end(head, roll, timeout_s)


async def _until_the_end(head: Step, roll: Roll, timeout_s: float) -> int:
    ended = asyncio.create_task(head.process.wait())
    joined = asyncio.create_task(roll.done.wait())
    with _first_signal() as signalled:
        waits: set[asyncio.Future[Any]] = {ended, joined, signalled}
        await asyncio.wait(waits, timeout=timeout_s, return_when=FIRST)
        if signalled.done():
            raise Interrupted(signalled.result())
        if not ended.done():
            roll.check(timeout_s)
            head.say(SERVE)
            await asyncio.wait({ended, signalled}, return_when=FIRST)
        if not ended.done():
            head.process.terminate()  # srun passes it on; after scancel the head has it already
        return _exit_code(await ended)


@contextlib.contextmanager
def _first_signal() -> Iterator[asyncio.Future[int]]:
    """Its number, once SIGINT or SIGTERM comes in the block; later ones change nothing."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()

    def hear(signum: int) -> None:
        if not first.done():
            first.set_result(signum)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(hear, signum)

    with handling(on_signal):
        yield first


def _exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One srun of ours, and through it its nodes."""

    process: asyncio.subprocess.Process

    def say(self, word: str) -> None:
        """A line to every node of the step."""
        if self.process.stdin is not None:
            self.process.stdin.write(f"{word}\n".encode())

    async def read(self, roll: Roll) -> None:
        """Until the step ends: what is for us to `roll`, the rest to our own stdout."""
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace")
            if not roll.hear(line):
                print(line, end="", flush=True)

    async def leave(self) -> None:
        """Its nodes end their Ray; a step that does not end in time is Slurm's to kill."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        with handling(signal.SIG_IGN):  # half an end leaves processes behind
            try:
                await asyncio.wait_for(self.process.wait(), LEAVE_TIMEOUT_S)
            except TimeoutError:
                log.warning("a step has not ended within %g s", LEAVE_TIMEOUT_S)
                self.process.kill()
                await self.process.wait()


async def _start(
    job: SlurmJob, nodes: Sequence[str], command: Sequence[str], environment: Mapping[str, str]
) -> Step:
    line = [*step_command(job, nodes), *command]
    try:
        process = await asyncio.create_subprocess_exec(
            *line,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
    except FileNotFoundError:
        raise StartupError("srun: not found; Slurm's commands have to be in PATH") from None
    return Step(process=process)
