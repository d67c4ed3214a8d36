"""What a Slurm job reads of Slurm, and what it keeps apart from its neighbours."""

from __future__ import annotations

import socket
from itertools import combinations
from pathlib import Path

import pytest

from orca_dist.cli import slurm
from orca_dist.cli.settings import Settings
from orca_dist.cli.slurm import (
    FIRST_PORT,
    NUM_PORT_SETS,
    PORTS_PER_JOB,
    OwnRay,
    SlurmJob,
    address_in,
    free_ports,
    job_folder,
    make_folder,
    node_address,
    own_addresses,
    ports,
    read_job,
)
from orca_dist.cli.slurm_job import (
    Roll,
    ServeCommand,
    node_command,
    serve_on_job,
    step_command,
    step_environment,
)
from orca_dist.cli.slurm_node import JOINED, LOST, ray_environment, read_task
from orca_dist.config import EngineConfig, Launcher
from orca_dist.errors import ConfigError, StartupError

SOCKET_PATH_LEN = 107  # Linux's limit
SESSION = "session_2026-11-30_09-25-09_930705_4194304"  # of the longest pid
JOB = SlurmJob(job_id=1234, nodes=("gpu01", "gpu02", "gpu07"), head="gpu01", cpus=16)
RAY = OwnRay(address="10.1.0.5", port=22340, client_port=22341, folder=Path("/tmp/orca-1234"))
COMMAND = ServeCommand(config=Path("/home/me/orca.yaml"), network="")


# ---- the job -----------------------------------------------------------


def test_outside_a_job_the_way_in_is_told() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_JOB_ID .*: not set.*sbatch slurm\.sbatch"):
        read_job({})


@pytest.fixture
def _expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_hostnames", lambda nodelist: ("gpu01", "gpu02"))


@pytest.mark.usefixtures("_expanded")
@pytest.mark.parametrize(
    ("variables", "head", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "16", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, "gpu01", 16),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x2),8"}, "gpu01", 8),
        ({"SLURMD_NODENAME": "gpu02"}, "gpu02", 1),
    ],
)
def test_the_head_and_the_cpus(variables: dict[str, str], head: str, cpus: int) -> None:
    job = read_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]", **variables})
    assert (job.job_id, job.head, job.cpus) == (7, head, cpus)
    assert {job.head, *job.workers} == {"gpu01", "gpu02"}
    assert len(job.workers) == 1


def test_a_step_has_a_task_on_each_of_its_nodes() -> None:
    words = step_command(JOB, JOB.workers)
    assert words[:3] == ["srun", "--nodes=2", "--ntasks=2"]
    assert {"--nodelist=gpu02,gpu07", "--cpus-per-task=16"} <= set(words)


def test_gpus_of_the_whole_job_become_gpus_of_a_node() -> None:
    theirs = {"SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4", "HF_HOME": "/hf", "RAY_ADDRESS": "x:1"}
    assert step_environment(theirs, "secret") == {
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_GPUS_ON_NODE": "4",
        "HF_HOME": "/hf",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "secret",
    }


# ---- what a node starts ------------------------------------------------


def ray_words(*, head: bool, **variables: str) -> list[str]:
    told = node_command(RAY, COMMAND, head=head)[3:]
    task = read_task(told, {"SLURMD_NODENAME": "gpu02", "SLURM_CPUS_PER_TASK": "16", **variables})
    return task.ray_start()


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_a_worker_joins_the_head_with_what_slurm_gave_it() -> None:
    words = ray_words(head=False, SLURM_GPUS_ON_NODE="4")
    assert value(words, "--address") == "10.1.0.5:22340"
    assert value(words, "--node-name") == "gpu02"
    assert (value(words, "--num-cpus"), value(words, "--num-gpus")) == ("16", "4")
    assert not {"--head", "--node-ip-address", "--port"} & set(words)


def test_the_head_has_the_ports_and_the_folder_of_the_job() -> None:
    words = ray_words(head=True)
    assert "--head" in words
    assert "--address" not in words
    assert value(words, "--node-ip-address") == "10.1.0.5"
    assert (value(words, "--port"), value(words, "--ray-client-server-port")) == ("22340", "22341")
    assert value(words, "--temp-dir").startswith("/tmp/orca-1234/")
    assert value(words, "--num-gpus") == "0"


def test_the_word_for_no_gpu_does_not_reach_ray() -> None:
    theirs = {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "HOME": "/home/me"}
    assert ray_environment(theirs) == {"HOME": "/home/me"}
    theirs = {"CUDA_VISIBLE_DEVICES": "5,3"}
    assert ray_environment(theirs) == theirs


# ---- who has joined ----------------------------------------------------


def test_those_who_have_not_joined_are_named() -> None:
    roll = Roll(JOB.nodes)
    assert roll.hear(f"{JOINED} gpu01\n")
    assert not roll.hear("ready 127.0.0.1:50051\n")
    with pytest.raises(StartupError, match=r"^nodes gpu02, gpu07 have not joined within 5 s"):
        roll.check(5.0)
    for node in ("gpu07", "gpu02"):
        assert not roll.done.is_set()
        roll.hear(f"{JOINED} {node}\n")
    assert roll.done.is_set()
    roll.check(5.0)


def test_a_node_without_a_ray_ends_the_wait() -> None:
    roll = Roll(JOB.nodes)
    roll.hear(f"{LOST} gpu07\n")
    assert roll.done.is_set()
    with pytest.raises(StartupError, match="Ray can't run on node gpu07"):
        roll.check(5.0)


def test_a_node_lost_later_is_the_servers_to_bear(caplog: pytest.LogCaptureFixture) -> None:
    roll = Roll(["gpu01"])
    roll.hear(f"{JOINED} gpu01\n")
    roll.hear(f"{LOST} gpu01\n")
    roll.check(5.0)
    assert "node gpu01 has lost its Ray" in caplog.text


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (EngineConfig(launcher=Launcher.LOCAL), "launcher = local: stages of a Slurm job are Ray"),
        (EngineConfig(ray_address="a:1"), "ray_address = a:1: a Slurm job starts a Ray of its own"),
        (EngineConfig(stages=0), "stages = 0: must be at least 1"),
    ],
)
def test_what_can_not_work_is_told_first(engine: EngineConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_on_job(Path("orca.yaml"), Settings(engine=engine), "")


# ---- addresses ---------------------------------------------------------


def test_an_address_is_one_of_the_machines_own() -> None:
    own = own_addresses()
    assert "127.0.0.1" in own
    assert node_address(socket.gethostname(), "", own) in own


def test_a_name_that_means_loopback_counts_for_nothing() -> None:
    assert node_address("localhost", "", ["10.1.0.5", "127.0.0.1"]) == "10.1.0.5"
    assert node_address("localhost", "", ["127.0.0.1"]) == "127.0.0.1"


def test_a_name_decides_between_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_resolved", lambda name: ["172.17.0.1"])
    own = ["10.1.0.5", "172.17.0.1", "127.0.0.1"]
    assert node_address("gpu01", "", own) == "172.17.0.1"
    assert node_address("gpu01", "10.1.0.0/16", own) == "10.1.0.5"


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("10.2.0.0/16", r"network = 10\.2\.0\.0/16: no address of .* it has 10\.1\.0\.5, 127"),
        ("eth0", "network = eth0: needs an IPv4 one such as"),
    ],
)
def test_a_network_that_is_none_of_ours(network: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        address_in(network, ["10.1.0.5", "127.0.0.1"])


# ---- ports and folders -------------------------------------------------


def test_neighbouring_jobs_share_no_port() -> None:
    sets = [set(ports(job_id)) for job_id in (1234, 1235, 1236, NUM_PORT_SETS - 1, 4_294_967_295)]
    assert all(len(each) == PORTS_PER_JOB for each in sets)
    assert all(not a & b for a, b in combinations(sets[:4], 2))
    assert all(FIRST_PORT <= port < 32_768 for each in sets for port in each)


def test_a_set_with_a_taken_port_is_passed_over() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports(1234)[3]))
        other.listen()
        assert free_ports(1234, "127.0.0.1")[0] > ports(1234)[-1]
    assert free_ports(1234, "127.0.0.1") == ports(1234)


@pytest.mark.parametrize("temp_dir", ["/tmp", "/scratch/j1", "/scratch/" + "x" * 81])
@pytest.mark.parametrize("job_id", [1, 4_294_967_295])
def test_sockets_fit_below_the_folder(temp_dir: str, job_id: int) -> None:
    folder = job_folder(job_id, temp_dir)
    path = folder / slurm.RAY_FOLDER / SESSION / "sockets" / "plasma_store.1"
    assert len(str(path)) <= SOCKET_PATH_LEN
    assert folder.name == f"orca-{job_id}"
    assert folder.parent == Path(temp_dir if len(temp_dir) < 20 else "/tmp")


def test_a_folder_is_for_us_alone_and_may_be_there(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "orca-7"
    make_folder(folder, anew=False)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "left").touch()
    make_folder(folder, anew=False)
    assert (folder / "left").exists()
    make_folder(folder, anew=True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("anew", [True, False])
def test_a_link_in_its_place_is_refused_and_not_followed(tmp_path: Path, anew: bool) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / "orca-7").symlink_to(precious)
    with pytest.raises(StartupError, match="orca-7: is not ours; set TMPDIR"):
        make_folder(tmp_path / "orca-7", anew=anew)
    assert (precious / "file").exists()
