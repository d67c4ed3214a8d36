"""Verdicts on one node, each of which names what was seen and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orca_dist.doctor.facts import (
    GpuFacts,
    InterfaceFacts,
    ModelFacts,
    PortFacts,
    SourceKind,
    SpaceFacts,
)
from orca_dist.doctor.node_checks import check_node
from orca_dist.doctor.verdicts import Check, Verdict
from tests.fixtures.doctored import FOLDER, HEALTHY, QUESTION, found, gpu

MIB = 2**20
ON_GPUS = replace(QUESTION, wants_cuda=True)


def test_a_healthy_node_passes_everything() -> None:
    findings = list(check_node(HEALTHY, QUESTION))
    assert {finding.verdict for finding in findings} == {Verdict.PASS}
    assert all(finding.seen and not finding.remedy for finding in findings)
    assert {finding.node for finding in findings} == {"10.0.0.1"}


def test_what_was_not_asked_is_not_judged() -> None:
    elsewhere = replace(QUESTION, source=None, host="")
    facts = replace(HEALTHY, port=None, model=None)
    checks = {finding.check for finding in check_node(facts, elsewhere)}
    assert not checks & {Check.PORT, Check.MODEL}


@pytest.mark.parametrize(("free_mib", "verdict"), [(511, Verdict.WARN), (512, Verdict.PASS)])
def test_shared_memory_has_a_threshold(free_mib: int, verdict: Verdict) -> None:
    space = SpaceFacts(total_bytes=512 * MIB, free_bytes=free_mib * MIB)
    assert found(replace(HEALTHY, shm=space), Check.SHM).verdict is verdict


def test_dockers_default_of_shared_memory_names_the_flag() -> None:
    space = SpaceFacts(total_bytes=64 * MIB, free_bytes=64 * MIB)
    finding = found(replace(HEALTHY, shm=space), Check.SHM)
    assert finding.seen == "64 MiB of 64 MiB free in /dev/shm, 512 MiB wanted"
    assert "--shm-size=1g" in finding.remedy


def test_few_open_files() -> None:
    finding = found(replace(HEALTHY, files_soft=1024, files_hard=524288), Check.FILES)
    assert finding.verdict is Verdict.WARN
    assert "ulimit -n 65536" in finding.remedy


def test_a_taken_port_names_its_holder() -> None:
    port = PortFacts(host="127.0.0.1", port=50051, problem="in use", holder="python (pid 7)")
    finding = found(replace(HEALTHY, port=port), Check.PORT)
    assert finding.verdict is Verdict.FAIL
    assert finding.seen == "port 50051 on 127.0.0.1: python (pid 7) listens there"


def test_no_compiler() -> None:
    facts = replace(HEALTHY, compiler_problem="none of c++, g++ is installed")
    assert found(facts, Check.COMPILER).verdict is Verdict.WARN
    checks = [finding.check for finding in check_node(facts, ON_GPUS)]
    assert Check.COMPILER not in checks


# ---- the model ---------------------------------------------------------


def test_a_folder_that_another_node_lacks() -> None:
    model = ModelFacts(name="/models/llama", fetched=False, problem="no such folder")
    facts = replace(HEALTHY, node="10.0.0.2", model=model, port=None)
    finding = found(facts, Check.MODEL, replace(QUESTION, host=""))
    assert (finding.verdict, finding.node) == (Verdict.FAIL, "10.0.0.2")
    assert finding.seen == "/models/llama: no such folder"
    assert "same path" in finding.remedy


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.1", Verdict.WARN), ("", Verdict.FAIL)])
def test_the_default_model_is_fetched_by_the_servers_own_node(host: str, verdict: Verdict) -> None:
    source = replace(FOLDER, is_default=True)
    model = ModelFacts(name=FOLDER.name, fetched=False, problem="no such folder")
    question = replace(QUESTION, source=source, host=host)
    finding = found(replace(HEALTHY, model=model), Check.MODEL, question)
    assert finding.verdict is verdict
    assert "orca-dist model fetch" in finding.remedy


def test_a_model_of_the_hub_may_be_fetched_at_start() -> None:
    source = replace(FOLDER, kind=SourceKind.HUB, name="org/name")
    question = replace(QUESTION, source=source)
    there = replace(HEALTHY, model=ModelFacts(name="org/name", fetched=False))
    finding = found(there, Check.MODEL, question)
    assert finding.verdict is Verdict.PASS
    assert "fetched at start" in finding.seen
    away = replace(HEALTHY, model=ModelFacts(name="org/name", fetched=False, problem="no network"))
    assert found(away, Check.MODEL, question).verdict is Verdict.FAIL


# ---- GPUs --------------------------------------------------------------


def test_gpus_of_a_kind_are_counted() -> None:
    gpus = GpuFacts(gpus=(gpu(0), gpu(1)), driver="570.1")
    finding = found(replace(HEALTHY, gpus=gpus), Check.GPUS, ON_GPUS)
    assert (finding.verdict, finding.seen) == (
        Verdict.PASS,
        "2 x H100 of 80.0 GiB, driver 570.1",
    )


def test_a_gpu_that_others_use() -> None:
    gpus = GpuFacts(gpus=(gpu(0), gpu(1, used_bytes=40 * 2**30)), driver="570.1")
    finding = found(replace(HEALTHY, gpus=gpus), Check.GPUS, ON_GPUS)
    assert finding.verdict is Verdict.WARN
    assert "GPU 1 has 40.0 GiB in use" in finding.seen


def test_a_torch_that_sees_no_gpu() -> None:
    gpus = GpuFacts(gpus=(gpu(),), driver="570.1", torch_problem="torch is built without CUDA")
    finding = found(replace(HEALTHY, gpus=gpus), Check.GPUS, ON_GPUS)
    assert finding.verdict is Verdict.FAIL
    assert "without CUDA" in finding.seen


@pytest.mark.parametrize(
    ("question", "verdict"), [(ON_GPUS, Verdict.FAIL), (QUESTION, Verdict.WARN)]
)
def test_a_driver_that_does_not_answer(question: object, verdict: Verdict) -> None:
    facts = replace(HEALTHY, gpus=GpuFacts(problem="nvidia-smi: no driver"))
    assert found(facts, Check.GPUS, question).verdict is verdict  # type: ignore[arg-type]


# ---- the interface -----------------------------------------------------


def test_an_address_that_no_interface_has() -> None:
    interface = InterfaceFacts(name="", others=("eth0", "lo"), named={})
    finding = found(replace(HEALTHY, interface=interface), Check.INTERFACE)
    assert finding.verdict is Verdict.FAIL
    assert "eth0, lo" in finding.seen


@pytest.mark.parametrize(
    ("variable", "value", "good"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "^lo", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=ib0,eth0", True),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "ib", False),
    ],
)
def test_variables_that_name_interfaces(variable: str, value: str, good: bool) -> None:
    """A wrong one is told with its name, its value and what there is."""
    interface = InterfaceFacts(name="eth0", others=("eth0", "lo"), named={variable: value})
    finding = found(replace(HEALTHY, interface=interface), Check.INTERFACE)
    assert (finding.verdict is Verdict.PASS) is good
    if not good:
        assert finding.verdict is Verdict.FAIL
        assert f"{variable}={value}" in finding.seen
        assert "eth0, lo" in finding.seen
