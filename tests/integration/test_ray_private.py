"""The Ray that is started for one server is for that server alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from orca_dist.engine.ray_pipeline import RayConfig, RayPlacement

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

JOIN = "import sys, ray; ray.init(address=sys.argv[1]); print('let in')"


@pytest.fixture(scope="module")
def placement() -> Iterator[RayPlacement]:
    config = RayConfig(address="", num_cpus=1, num_gpus=0, num_stages=1, place_timeout_s=60)
    placement = RayPlacement(config)
    yield placement
    placement.close()


def test_nothing_of_it_listens_beyond_this_machine(placement: RayPlacement) -> None:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_who_has_no_token_is_not_let_in(placement: RayPlacement, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()  # it is there
    theirs = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    stranger = subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env=theirs | {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": "a-guess"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert stranger.returncode != 0
    assert "let in" not in stranger.stdout
    assert "token" in stranger.stderr.lower()
