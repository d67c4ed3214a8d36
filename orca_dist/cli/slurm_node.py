"""One node of a Slurm job: its part of the job's Ray and, on the head, the server.

Started by `orca_dist.cli.slurm_job` through srun; stdin and stdout are the job's (see there).
Whatever this process starts is its own to end: it adopts the orphans among its descendants
(Ray's daemons are), and kills them all when it ends.

Slurm may send SIGTERM to every process of a step at once (scancel, with some ways to track
processes). Neither Ray nor the server may die of it while answers run: both start with SIGTERM
blocked, and the server is told by SIGINT instead, once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from orca_dist.cli.interrupts import handling
from orca_dist.cli.main import ended
from orca_dist.cli.slurm import RAY_FOLDER, address_in, make_folder, own_addresses
from orca_dist.errors import StartupError

JOINED, LOST, SERVE = "joined", "lost", "serve"  # the words between a job and its nodes
OBJECT_STORE_BYTES = 80 * 2**20  # the smallest that Ray takes; no object ever goes there
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
DAEMON = "raylet"  # without it a node has no Ray
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
NO_GPUS = "NoDevFiles"  # older Slurms' word for none in CUDA_VISIBLE_DEVICES
RETRY_S = 0.5
KILL_TIMEOUT_S = 10.0
MAX_LINES = 20
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTask:
    """What the job told this node; `serve` is the server's settings, on the head alone."""

    name: str
    address: str
    port: int
    client_port: int
    folder: Path
    own_address: str
    num_cpus: int
    num_gpus: int
    serve: Path | None

    @property
    def is_head(self) -> bool:
        return self.serve is not None

    def ray_start(self) -> list[str]:
        """The command that starts Ray here and returns once it is up and has joined.

        All ports but the head's two are Ray's own choice: others may use any fixed one.
        """
        words = [*RAY, "start", "--node-name", self.name, "--disable-usage-stats"]
        words += ["--num-cpus", str(self.num_cpus), "--num-gpus", str(self.num_gpus)]
        words += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
        words += ["--min-worker-port", "0", "--max-worker-port", "0"]
        words += ["--dashboard-agent-listen-port", "0"]
        if self.own_address:
            words += ["--node-ip-address", self.own_address]
        return words + (self._head_words() if self.is_head else self._worker_words())

    def _head_words(self) -> list[str]:
        return [
            *("--head", "--port", str(self.port), "--temp-dir", str(self.folder / RAY_FOLDER)),
            *("--ray-client-server-port", str(self.client_port), "--include-dashboard", "false"),
        ]

    def _worker_words(self) -> list[str]:
        return ["--address", f"{self.address}:{self.port}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the server on the head; 0 or 1 on a worker."""
    task = read_task(arguments, os.environ)
    return ended(lambda: run(task))


def read_task(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> NodeTask:
    parser = argparse.ArgumentParser(prog="slurm_node", description=__doc__)
    parser.add_argument("--address", required=True, help="of the head")
    parser.add_argument("--port", type=int, required=True, help="of the head's Ray")
    parser.add_argument("--client-port", type=int, default=0, help="of Ray's own clients")
    parser.add_argument("--folder", type=Path, required=True, help="of the job, on every node")
    parser.add_argument("--network", default="", help="of the nodes' addresses")
    parser.add_argument("--serve", type=Path, help="settings of the server; on the head alone")
    told = parser.parse_args(arguments)
    return NodeTask(
        name=environment["SLURMD_NODENAME"],
        address=told.address,
        port=told.port,
        client_port=told.client_port,
        folder=told.folder,
        own_address=told.address if told.serve else _own_address(told.network),
        num_cpus=int(environment.get("SLURM_CPUS_PER_TASK", "1")),
        num_gpus=int(environment.get("SLURM_GPUS_ON_NODE") or "0"),
        serve=told.serve,
    )


def _own_address(network: str) -> str:
    """Of a worker; empty: Ray takes that of the interface which leads to the head."""
    return address_in(network, own_addresses()) if network else ""


def run(task: NodeTask) -> int:
    """Until the job or the server ends; nothing that was started here outlives it."""
    adopt_orphans()
    try:
        return asyncio.run(_live(task))
    finally:
        with handling(signal.SIG_IGN):
            kill_descendants()
        shutil.rmtree(task.folder, ignore_errors=True)


async def _live(task: NodeTask) -> int:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(told.set)

    with handling(on_signal):
        words = await _stdin()
        if task.serve is None:
            return await _work(task, words, told)
        return await _head(task, task.serve, words, told)


async def _work(task: NodeTask, words: asyncio.StreamReader, told: asyncio.Event) -> int:
    """Until the job ends. SIGTERM is no reason to end Ray: answers may still need it."""
    over = asyncio.create_task(words.read())
    daemon = await _joined(task, over, told)
    if daemon is None:
        return 0
    died = asyncio.create_task(_death(daemon))
    await _first(over, died)
    if not over.done():
        print(f"{LOST} {task.name}", flush=True)
        raise StartupError(f"node {task.name}: its Ray has ended")
    return 0


async def _head(
    task: NodeTask, config: Path, words: asyncio.StreamReader, told: asyncio.Event
) -> int:
    """Until the server ends, or the job does."""
    word = asyncio.create_task(words.readline())
    if await _joined(task, word, told) is None:
        return TERMINATED
    stopped = asyncio.create_task(told.wait())
    await _first(word, stopped)
    if stopped.done() or not await word:
        return TERMINATED
    server = await _shielded(_serve_command(task, config))
    ended = asyncio.create_task(server.wait())
    over = asyncio.create_task(words.read())
    await _first(ended, over, stopped)
    if stopped.done() and not ended.done():
        server.send_signal(signal.SIGINT)
        await _first(ended, over)
    if not ended.done():  # nobody is there to hear of it
        return TERMINATED
    return _exit_code(await ended, told=stopped.done())


def _serve_command(task: NodeTask, config: Path) -> list[str]:
    address = f"{task.address}:{task.port}"
    serve = ["serve", "--config", str(config), "--ray-address", address]
    return [sys.executable, "-m", "orca_dist", *serve]


def _exit_code(returncode: int, *, told: bool) -> int:
    """The server's own; our SIGINT stood for the SIGTERM that we got."""
    code = returncode if returncode >= 0 else 128 - returncode
    return TERMINATED if told and code == INTERRUPTED else code


async def _joined(
    task: NodeTask, over: asyncio.Task[bytes], told: asyncio.Event
) -> psutil.Process | None:
    """Ray's daemon, once this node is one of the job's Ray; None if all ended before that."""
    joining = asyncio.create_task(_join(task))
    await _first(joining, over, asyncio.create_task(told.wait()))
    if not joining.done():
        joining.cancel()
        return None
    try:
        daemon = joining.result()
    except StartupError:
        print(f"{LOST} {task.name}", flush=True)
        raise
    print(f"{JOINED} {task.name}", flush=True)
    return daemon


async def _join(task: NodeTask) -> psutil.Process:
    """Raises StartupError with what Ray said."""
    make_folder(task.folder, anew=False)
    if not task.is_head:
        await _answers(task.address, task.port)
    with tempfile.TemporaryFile() as output:
        starter = await _shielded(task.ray_start(), output)
        code = await starter.wait()
        if code or (daemon := _daemon()) is None:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-MAX_LINES:]
            print("\n".join(lines), file=sys.stderr)
            raise StartupError(
                f"node {task.name}: `ray start` ended with {code}; what it said is above"
            )
        return daemon


async def _answers(address: str, port: int) -> None:
    """Returns once the head's Ray does; the job ends the wait where it never will."""
    while True:
        try:
            _, writer = await asyncio.open_connection(address, port)
        except OSError:
            await asyncio.sleep(RETRY_S)
        else:
            writer.close()
            return


def _daemon() -> psutil.Process | None:
    """Ray's process for this node, of those that we started."""
    below = psutil.Process().children(recursive=True)
    return next((process for process in below if process.name() == DAEMON), None)


async def _death(process: psutil.Process) -> None:
    """Returns when a process that is no child of asyncio's ends."""
    ended = asyncio.Event()
    with contextlib.ExitStack() as stack:
        descriptor = os.pidfd_open(process.pid)
        stack.callback(os.close, descriptor)
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        stack.callback(loop.remove_reader, descriptor)
        await ended.wait()


async def _shielded(
    command: Sequence[str], output: IO[bytes] | None = None
) -> asyncio.subprocess.Process:
    """Starts `command` with SIGTERM blocked, in it and all that it starts."""
    with _blocked(signal.SIGTERM):
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=ray_environment(os.environ),
        )


def ray_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without the word that stands for no GPU, which would count as one."""
    cleared = environment.get("CUDA_VISIBLE_DEVICES") == NO_GPUS
    return {
        name: value
        for name, value in environment.items()
        if not (cleared and name == "CUDA_VISIBLE_DEVICES")
    }


@contextlib.contextmanager
def _blocked(signum: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def _first(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


# ---- ending ------------------------------------------------------------


def adopt_orphans() -> None:
    """From now on descendants that lose their parent become our children, not init's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(ADOPT_ORPHANS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def kill_descendants() -> None:
    """All of them, orphans too, and nobody else."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            return


if __name__ == "__main__":
    sys.exit(main())
