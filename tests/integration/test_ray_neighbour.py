"""A Ray that somebody else runs on this machine is neither joined nor stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray

from orca_dist.bootstrap import StageBootstrap
from orca_dist.engine.ray_pipeline import RayConfig, RayPlacement
from orca_dist.errors import StartupError
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.live import live, local_config

pytestmark = pytest.mark.ray

STOP_S = 20.0


@pytest.mark.slow
def test_not_joined_and_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = loud_llama(tmp_path / "loud")
    with _neighbour() as (address, processes):
        monkeypatch.setenv("RAY_ADDRESS", address)
        environment = dict(os.environ)
        with live(folder, local_config(2, launcher="ray")) as front:
            (answer,) = front.generate([[5, 9, 17]], 4)
            pids = [stage.pid for stage in front.engine.info().stages]
            theirs = {child.pid for process in processes for child in process.children()}
            assert len(answer.tokens) == 4
            assert not set(pids) & theirs
        assert all(process.is_running() for process in processes)
        assert dict(os.environ) == environment


def test_more_gpu_stages_than_gpus() -> None:
    """Refused at once with the numbers; nothing is left, so that another start works."""
    placement = RayPlacement(
        RayConfig(address="", num_cpus=1, num_gpus=8, num_stages=8, place_timeout_s=60)
    )
    bootstraps = [StageBootstrap(stage=i, control_address="", secret="") for i in range(8)]
    try:
        with pytest.raises(StartupError, match=r"stages = 8 need 64 GPUs, this machine has \d+"):
            placement.launch(bootstraps, on_death=lambda stage, why: None)
    finally:
        placement.close()
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_second_ray_in_one_process_is_refused(tmp_path: Path) -> None:
    """In words, and without harm to the first, whose CPUs are fractions here."""
    folder = loud_llama(tmp_path / "loud")
    config = local_config(2, launcher="ray", cpus_per_stage=0.7)
    with live(folder, config) as front:
        with pytest.raises(StartupError, match="connected to a Ray already"), live(folder, config):
            pass
        (answer,) = front.generate([[5, 9, 17]], 4)
        assert len(answer.tokens) == 4


@contextmanager
def _neighbour() -> Iterator[tuple[str, list[psutil.Process]]]:
    """A Ray head with a folder of its own; ended by the ids of its processes."""
    with tempfile.TemporaryDirectory(prefix="n", ignore_cleanup_errors=True) as folder:
        port = _free_port()
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
                *("--port", str(port), "--temp-dir", folder, "--include-dashboard", "false"),
                *("--num-cpus", "1", "--object-store-memory", str(80 * 2**20)),
                *("--node-ip-address", "127.0.0.1", "--disable-usage-stats"),
            ],
            check=True,
            capture_output=True,
            timeout=60,
            env=os.environ | {"HOME": folder},  # where it keeps its token
        )
        processes = _of_folder(folder)
        try:
            assert processes
            yield f"127.0.0.1:{port}", processes
        finally:
            ending = _of_folder(folder)
            for process in ending:
                process.terminate()
            for process in psutil.wait_procs(ending, STOP_S)[1]:
                process.kill()


def _of_folder(folder: str) -> list[psutil.Process]:
    """The long-lived processes that were started with this folder in their arguments."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(folder in argument for argument in process.info["cmdline"] or ())
        and process.pid != os.getpid()
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_wrong_ray_address_is_told_at_once() -> None:
    address = f"127.0.0.1:{_free_port()}"
    config = RayConfig(address=address, num_cpus=1, num_gpus=0, num_stages=1, place_timeout_s=5)
    with pytest.raises(StartupError, match=f"no Ray answers at ray_address = {address}"):
        RayPlacement(config)
    assert not ray.is_initialized()
