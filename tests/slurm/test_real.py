"""launch/slurm.sbatch on a real Slurm of two nodes: submit, call, cancel."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import yaml

from orca_dist import Client, SamplingParams
from orca_dist.errors import OrcaError
from tests.fixtures.checkpoints import letter, script_llama
from tests.fixtures.serving import gone, name_of
from tests.fixtures.slurm import ROOT, Job, Slurm, missing_programs, running_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LEAVE_S = 15.0
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if missing := missing_programs():
        pytest.skip(f"needs Slurm: no {', '.join(missing)} here; `make test-slurm` installs it")
    with running_slurm() as slurm:
        yield slurm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Goes through the alphabet for ever; long enough to be cancelled in the middle."""
    letters = {letter(a): letter(b) for a, b in zip(ALPHABET, ALPHABET[1:] + "A", strict=True)}
    folder = tmp_path_factory.mktemp("model")
    return script_llama(
        folder, lambda i: letters.get(i, letter("A")), num_layers=2, max_model_len=16384
    )


@pytest.fixture
def app(tmp_path: Path, model: Path) -> Path:
    """A user's folder: the script as the repository has it, and settings."""
    shutil.copy(ROOT / "launch" / "slurm.sbatch", tmp_path)
    settings = {
        "model": str(model),
        "stages": 2,
        "device": "cpu",
        "dtype": "float32",
        "kv_tokens": 32768,
        "port": 0,
        "drain_s": 80,
        "start_timeout_s": 120,
    }
    (tmp_path / "orca.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def change(app: Path, **settings: object) -> None:
    path = app / "orca.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | settings))


def place(job: Job) -> tuple[str, Path]:
    """The job's Ray and its folder, as it says."""
    match = job.find(r"head n\d at (\S+), .* folder (\S+)$")
    return match[1], Path(match[2])


def assert_nothing_is_left(job: Job, processes: list[psutil.Process]) -> None:
    address, folder = place(job)
    assert gone(processes, LEAVE_S)
    assert job.processes() == []
    assert not folder.exists()
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))


def answer(address: str, num_tokens: int = 4) -> str:
    with Client(address) as client:
        return client.generate("A", SamplingParams(max_tokens=num_tokens)).text


def test_two_nodes_serve_and_drain_when_cancelled(slurm: Slurm, app: Path) -> None:
    job = slurm.submit(app, "--cpus-per-task=1", "--gpus=2")
    address = job.ready()
    processes = job.processes()
    assert _gpus_of(processes) == {"n1": "1", "n2": "1"}
    with Client(address) as client:
        stages = client.info(timeout_s=10).stages
        assert _nodes_of(stages) == ["n1", "n2"]
        assert_is_private(*place(job))
        assert answer(address) == "BCDE"
        chunks = client.stream("A", SamplingParams(max_tokens=2000))
        text = next(chunks).text
        slurm.command("scancel", str(job.job_id))
        while client.health():  # until it is told, which is at once
            pass
        rest = list(chunks)
    assert rest, "the answer had ended before the job was cancelled"
    text += "".join(chunk.text for chunk in rest)
    assert text == (ALPHABET * 77)[1:2001]
    assert rest[-1].finish_reason == "length"
    assert slurm.end_of(job) == ("CANCELLED", "143:0")
    assert_nothing_is_left(job, processes)


def _nodes_of(stages: object) -> list[str]:
    pids = [stage.pid for stage in stages]  # type: ignore[attr-defined]
    return sorted(psutil.Process(pid).environ()["SLURMD_NODENAME"] for pid in pids)


def _gpus_of(processes: list[psutil.Process]) -> dict[str, str]:
    """How many each node's Ray knows of."""
    raylets = [process for process in processes if name_of(process) == "raylet"]
    return {raylet.environ()["SLURMD_NODENAME"]: _num_gpus(raylet.cmdline()) for raylet in raylets}


def _num_gpus(words: list[str]) -> str:
    match = re.search(r"static_resource_list=.*\bGPU,(\d+)", " ".join(words))
    return match[1] if match else "none"


def assert_is_private(address: str, folder: Path) -> None:
    """Nobody without the job's token, and nobody else's files."""
    assert folder.stat().st_mode & 0o777 == 0o700
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(ALIVE)(b"", timeout=20)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_two_jobs_share_the_nodes_and_nothing_else(slurm: Slurm, app: Path) -> None:
    """Both over both nodes; one is cancelled, the other does not notice."""
    jobs = [slurm.submit(app, "--cpus-per-task=1") for _ in range(2)]
    addresses = [job.ready() for job in jobs]
    places = [place(job) for job in jobs]
    assert len(set(addresses)) == len({a for a, _ in places}) == len({f for _, f in places}) == 2
    first, second = ({p.pid: p for p in job.processes()} for job in jobs)
    with Client(addresses[1]) as client:
        chunks = client.stream("A", SamplingParams(max_tokens=3000))
        num_tokens = len(next(chunks).token_ids)
        slurm.command("scancel", str(jobs[0].job_id))
        assert slurm.end_of(jobs[0])[0] == "CANCELLED"
        assert_nothing_is_left(jobs[0], list(first.values()))
        assert all(process.is_running() for process in second.values())
        num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
    assert num_tokens == 3000
    assert answer(addresses[1]) == "BCDE"
    slurm.command("scancel", str(jobs[1].job_id))
    assert slurm.end_of(jobs[1])[0] == "CANCELLED"
    assert_nothing_is_left(jobs[1], list(second.values()))


def test_one_node_works_and_the_servers_exit_code_is_the_jobs(slurm: Slurm, app: Path) -> None:
    change(app, recovery=False)
    job = slurm.submit(app, "--nodes=1", "--cpus-per-task=2")
    address = job.ready()
    processes = job.processes()
    command = [sys.executable, "-m", "orca_dist", "generate", "A", "--max-tokens", "3"]
    inside = ["srun", f"--jobid={job.job_id}", "--overlap", "--ntasks=1", *command]
    assert slurm.command(*inside, "--address", address) == "BCD\n"
    with Client(address) as client:
        psutil.Process(client.info(timeout_s=10).stages[1].pid).kill()
        with pytest.raises(OrcaError):
            list(client.stream("A", SamplingParams(max_tokens=8000)))
    assert slurm.end_of(job) == ("FAILED", "4:0")
    assert re.search(r"^error: stage 1 ", job.output.read_text(), re.MULTILINE)
    assert_nothing_is_left(job, processes)


def test_settings_that_can_not_work_end_the_job_at_once(slurm: Slurm, app: Path) -> None:
    change(app, stages=0)
    job = slurm.submit(app)
    assert slurm.end_of(job) == ("FAILED", "2:0")
    assert job.output.read_text() == "error: stages = 0: must be at least 1\n"


def test_a_killed_script_leaves_nothing(slurm: Slurm, app: Path) -> None:
    """SIGKILL of the job's script, while its nodes serve."""
    job = slurm.submit(app, "--cpus-per-task=1")
    job.ready()
    processes = job.processes()
    (script,) = (
        p for p in processes if p.cmdline()[1:5] == ["-m", "orca_dist", "cluster", "slurm"]
    )
    script.kill()
    assert gone(processes, 3 * LEAVE_S)
    slurm.end_of(job)
    assert_nothing_is_left(job, processes)
