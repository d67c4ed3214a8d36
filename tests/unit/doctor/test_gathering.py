"""What a node finds out about itself, where its surroundings are made up, and as they are."""

from __future__ import annotations

import os
import socket
from concurrent import futures
from pathlib import Path

import grpc
import psutil
import pytest

from orca_dist.cgroups import cgroup_limit
from orca_dist.doctor.facts import Source, SourceKind
from orca_dist.doctor.gpus import gpu_facts
from orca_dist.doctor.memory import memory_facts, shm_facts
from orca_dist.doctor.models import model_facts
from orca_dist.doctor.network import interface_facts, port_facts
from orca_dist.doctor.open_ray import ask_without_token
from orca_dist.engine.ray_address import CHECK_ALIVE
from tests.fixtures.checkpoints import loud_llama

MIB = 2**20

# ---- memory ------------------------------------------------------------


def test_shared_memory_by_an_injected_statvfs() -> None:
    def statvfs(path: str) -> os.statvfs_result:
        assert path == "/dev/shm"
        return os.statvfs_result((4096, 4096, 16384, 9000, 8192, 0, 0, 0, 0, 255))

    space = shm_facts(statvfs)
    assert (space.total_bytes, space.free_bytes, space.problem) == (64 * MIB, 32 * MIB, "")


def test_no_shared_memory_at_all() -> None:
    def statvfs(path: str) -> os.statvfs_result:
        raise FileNotFoundError(2, "No such file or directory")

    assert shm_facts(statvfs).problem == "/dev/shm: No such file or directory"


def group(folder: Path, limit: str, used: str = "1000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    own = tmp_path / "own"
    own.write_text("0::/pod/box\n")
    return own


def test_the_lowest_limit_around_a_process_counts(tmp_path: Path, own: Path) -> None:
    """A pod's may be lower than its container's."""
    root = tmp_path / "cgroup"
    group(root / "pod" / "box", "5000", "10")
    group(root / "pod", "4000", "70")
    assert cgroup_limit(own, root) == (4000, 70)


def test_no_limit(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "cgroup" / "pod" / "box", "max")
    assert cgroup_limit(own, tmp_path / "cgroup") is None
    assert cgroup_limit(tmp_path / "absent", tmp_path / "cgroup") is None


def test_files_above_the_root_are_nobodys_limit(tmp_path: Path, own: Path) -> None:
    group(tmp_path, "1")
    (tmp_path / "cgroup").mkdir()
    assert cgroup_limit(own, tmp_path / "cgroup") is None


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/box\n3:memory:/box\n")
    folder = tmp_path / "cgroup" / "memory" / "box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("777\n")
    (folder / "memory.usage_in_bytes").write_text("7\n")
    assert cgroup_limit(own, tmp_path / "cgroup") == (777, 7)


def test_memory_as_it_is_here() -> None:
    memory = memory_facts()
    assert 0 < memory.available_bytes <= memory.limit_bytes <= psutil.virtual_memory().total


# ---- GPUs --------------------------------------------------------------


def tool(folder: Path, script: str) -> None:
    """An nvidia-smi that comes first."""
    folder.mkdir()
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_gpus_by_the_drivers_tool(tools: Path) -> None:
    tool(tools, "echo '0, NVIDIA H100 80GB HBM3, 81559, 4, 570.86'; echo '1, L4, 23034, 9, 570.86'")
    facts = gpu_facts(ask_torch=False)
    assert [(gpu.index, gpu.name) for gpu in facts.gpus] == [
        (0, "NVIDIA H100 80GB HBM3"),
        (1, "L4"),
    ]
    assert facts.gpus[0].memory_bytes == 81559 * MIB
    assert facts.gpus[1].used_bytes == 9 * MIB
    assert (facts.driver, facts.problem) == ("570.86", "")


def test_a_tool_that_fails_is_quoted(tools: Path) -> None:
    tool(tools, "echo 'NVIDIA-SMI has failed: no driver'; exit 9")
    assert gpu_facts(ask_torch=True).problem == "nvidia-smi: NVIDIA-SMI has failed: no driver"


def test_a_tool_that_says_something_else(tools: Path) -> None:
    tool(tools, "echo 'No devices were found'")
    facts = gpu_facts(ask_torch=False)
    assert (facts.gpus, facts.problem) == ((), "nvidia-smi says No devices were found")


def test_device_files_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    device_file = tmp_path / "nvidiactl"
    assert gpu_facts(ask_torch=True, device_file=device_file).problem == ""
    device_file.touch()
    problem = gpu_facts(ask_torch=True, device_file=device_file).problem
    assert problem == f"{device_file} is here, nvidia-smi is not"


# ---- network -----------------------------------------------------------


def test_loopback_addresses_belong_to_the_loopback_interface() -> None:
    assert interface_facts("127.0.0.1").name == interface_facts("127.9.9.9").name != ""


def test_an_address_of_another_machine_belongs_to_none() -> None:
    facts = interface_facts("203.0.113.7")
    assert facts.name == ""
    assert interface_facts("127.0.0.1").name in facts.others


def test_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert interface_facts("127.0.0.1").named == {"GLOO_SOCKET_IFNAME": "ib7"}


def test_a_port_and_who_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        facts = port_facts("127.0.0.1", holder.getsockname()[1])
        assert facts.problem == "Address already in use"
        assert facts.holder.endswith(f"(pid {os.getpid()})")
    assert port_facts("127.0.0.1", facts.port).problem == ""
    assert port_facts("127.0.0.1", 0).problem == ""


def test_a_host_that_is_not_here() -> None:
    assert port_facts("203.0.113.7", 0).problem == "Cannot assign requested address"


# ---- Ray, without a token ----------------------------------------------


class Head(grpc.GenericRpcHandler):
    """Answers the one call, or refuses it."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return (
            grpc.unary_unary_rpc_method_handler(self._answer)
            if details.method == CHECK_ALIVE
            else None
        )

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if self._status is not grpc.StatusCode.OK:
            context.abort(self._status, "no")
        return b""


@pytest.mark.parametrize(
    ("status", "is_open"),
    [
        (grpc.StatusCode.OK, True),
        (grpc.StatusCode.UNAUTHENTICATED, False),
        (grpc.StatusCode.INTERNAL, None),
    ],
)
def test_a_head_is_asked_over_the_wire(status: grpc.StatusCode, is_open: bool | None) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Head(status)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        port = ask_without_token(address)
    finally:
        server.stop(None)
    assert (port.address, port.open) == (address, is_open)
    assert bool(port.problem) is (is_open is None)


# ---- models ------------------------------------------------------------


def test_a_folder_is_looked_into(tmp_path: Path) -> None:
    folder = loud_llama(tmp_path / "loud")
    source = Source(kind=SourceKind.FOLDER, name=str(folder))
    assert model_facts(source).fetched
    (folder / "model.safetensors").write_bytes(b"cut")
    facts = model_facts(source)
    assert not facts.fetched
    assert "model.safetensors" in facts.problem
    dummy = Source(kind=SourceKind.FOLDER, name=str(folder), has_weights=False)
    assert model_facts(dummy).fetched


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    source = Source(kind=SourceKind.FOLDER, name=str(tmp_path / "absent"))
    assert model_facts(source).problem == "no such folder"
