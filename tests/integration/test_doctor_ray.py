"""`orca-dist doctor` on a real Ray: two nodes with addresses of their own, and an open head."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.ray_heads import ray_started
from tests.fixtures.serving import name_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SECOND = "127.0.0.2"
DOCTOR_S = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("doctor") / "loud")


def doctor(folder: Path, environment: Mapping[str, str], *flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "orca_dist", "doctor", str(folder), "--port", "0"]
    done = subprocess.run(
        [*command, "--device", "cpu", *flags, "--json"],
        capture_output=True,
        text=True,
        timeout=DOCTOR_S,
        env=dict(environment),
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Two nodes that want a token; the second was started with a wrong variable.

    Who asks has the token, and hasn't been told that one is wanted.
    """
    nodes = [("127.0.0.1", {}), (SECOND, {"GLOO_SOCKET_IFNAME": "nic7"})]
    with ray_started(nodes, "token") as (address, environment):
        yield address, {k: v for k, v in environment.items() if k != "RAY_AUTH_MODE"}


@pytest.fixture(scope="module")
def report(folder: Path, cluster: tuple[str, Mapping[str, str]]) -> tuple[int, dict[str, Any]]:
    address, environment = cluster
    report = doctor(folder, environment, "--ray-address", address)
    actors = [p for p in psutil.process_iter() if "ExaminerActor" in name_of(p)]
    assert psutil.wait_procs(actors, 20)[1] == []
    return report


def of_check(report: dict[str, Any], check: str) -> list[tuple[str, str]]:
    """Node and verdict of each finding."""
    found = [each for each in report["findings"] if each["check"] == check]
    return [(each["node"], each["verdict"]) for each in found]


def test_every_node_is_asked(report: tuple[int, dict[str, Any]]) -> None:
    _, document = report
    first, second = (node["node"] for node in document["nodes"])
    assert second == SECOND
    assert of_check(document, "model") == [(first, "pass"), (second, "pass")]
    for check in ("port", "access"):
        assert of_check(document, check) == [(first, "pass")]  # the server's own node
    assert of_check(document, "versions") == [("", "pass")]
    assert of_check(document, "places") == [("", "pass")]  # a CPU each


def test_every_pair_is_connected(report: tuple[int, dict[str, Any]]) -> None:
    _, document = report
    names = [node["node"] for node in document["nodes"]]
    links = document["links"]
    assert {(link["source"], link["target"]) for link in links} == {
        (source, target) for source in names for target in names
    }
    assert all(link["latency_s"] > 0 and link["bytes_s"] > 0 for link in links)
    assert of_check(document, "clock") == [("", "pass")]  # they share one


def test_a_wrong_variable_of_one_node_is_its_own(report: tuple[int, dict[str, Any]]) -> None:
    code, document = report
    assert code == 1
    assert (SECOND, "fail") in of_check(document, "interface")
    (seen,) = (
        each["seen"]
        for each in document["findings"]
        if each["check"] == "interface" and each["verdict"] == "fail"
    )
    assert seen.startswith("GLOO_SOCKET_IFNAME=nic7 names no interface here; this node has ")


def test_a_head_that_wants_a_token(report: tuple[int, dict[str, Any]]) -> None:
    _, document = report
    assert of_check(document, "ray") == [("", "pass")]


@pytest.mark.parametrize(
    ("token", "who"), [("wrong", "the token of this process"), ("", "who has no token")]
)
def test_who_has_not_its_token_is_told(
    folder: Path, cluster: tuple[str, Mapping[str, str]], token: str, who: str
) -> None:
    address, environment = cluster
    code, document = doctor(
        folder, {**environment, "RAY_AUTH_TOKEN": token}, "--ray-address", address
    )
    failed = [each for each in document["findings"] if each["verdict"] == "fail"]
    assert code == 1
    assert f"ray_address = {address} refuses {who}: give it the one" in str(failed)


def test_an_open_head_is_found_without_its_address(folder: Path) -> None:
    with ray_started([("127.0.0.1", {})], "disabled") as (address, environment):
        code, document = doctor(folder, environment)
    port = address.rpartition(":")[2]
    assert code == 1
    assert [
        each["verdict"]
        for each in document["findings"]
        if each["check"] == "ray" and f":{port} " in each["seen"]
    ] == ["fail"]
