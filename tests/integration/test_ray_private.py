"""The Ray that is started for one server is for that server alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import ray

from orca_dist.engine import ray_pipeline
from orca_dist.engine.ray_pipeline import RayConfig, RayPlacement
from tests.fixtures.checkpoints import loud_llama

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a call that anybody may try
TIMEOUT_S = 20.0


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


def test_who_has_no_token_is_not_let_in(
    placement: RayPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    address = ray.get_runtime_context().gcs_address
    assert status_of(address, "") is grpc.StatusCode.UNAUTHENTICATED
    assert status_of(address, "Bearer a-guess") is grpc.StatusCode.UNAUTHENTICATED
    ours = f"Bearer {ray_pipeline._process_token()}"
    assert status_of(address, ours) is grpc.StatusCode.OK


@pytest.mark.slow
def test_what_stages_log_comes_as_it_was_written(tmp_path: Path) -> None:
    """Each line of JSON, those that look alike too."""
    folder = loud_llama(tmp_path / "model")
    flags = "--launcher ray --stages 2 --device cpu --requests 1 --json --log-format json"
    ran = subprocess.run(
        [sys.executable, "-m", "orca_dist", "bench", "offline", str(folder), *flags.split()],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    loaded = [line["stage"] for line in lines if line["message"].startswith("layers ")]
    assert sorted(loaded) == [0, 1]


def status_of(address: str, authorization: str) -> grpc.StatusCode:
    """How Ray's own service answers."""
    metadata = (("authorization", authorization),) if authorization else ()
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ALIVE)(b"", timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK
