"""`ray up cluster/ray/on-premise.yaml` between hosts that know each other by ssh; `serve` there.

Only the installation is left out: the hosts see this machine's Python. Everything else, the way
Ray is started and stopped included, is the file's own.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.utils import get_num_cpus

from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.ssh_hosts import SshHost, ssh_hosts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

ROOT = Path(__file__).parents[2]
FILE = ROOT / "cluster" / "ray" / "on-premise.yaml"
BIN = "~/orca_dist/.venv/bin"
LIMIT_S = 180.0
TERMINATED = 143
OLD_AUTOSCALER = {"RAY_UP_enable_autoscaler_v2": "0"}  # the other starts no worker of this provider
# Serves, asks, ends. A stage takes a whole machine; the second may be there later than `serve`.
SESSION = """
coproc SERVER {
  exec orca-dist serve ~/model --stages 2 --cpus-per-stage CPUS --device cpu --dtype float32 \\
    --kv-tokens 512 --port 0 --ray-address auto
}
read -u ${SERVER[0]} word address
orca-dist info --json --address $address
kill $SERVER_PID
wait $SERVER_PID
echo code $?
""".replace("CPUS", str(get_num_cpus()))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[SshHost, SshHost, SshHost]]:
    with ssh_hosts(3, tmp_path) as (desk, head, worker):
        yield desk, head, worker


def test_a_cluster_comes_up_serves_on_both_machines_and_goes_down(
    machines: tuple[SshHost, SshHost, SshHost], tmp_path: Path
) -> None:
    desk, head, worker = machines
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config_for(head, worker, loud_llama(tmp_path / "model"))))
    token = secrets.token_hex(32)
    run(desk, "bash", "-c", f"mkdir -m 700 ~/.ray && echo -n {token} > ~/.ray/auth_token")

    assert "Ray runtime started" in ray(desk, "up", "-y", str(file))
    said = ray(desk, "exec", str(file), SESSION)
    _, start, document = said.partition('{"schema"')  # beside what the terminal shows of progress
    assert start, said
    info, _ = json.JSONDecoder().raw_decode(start + document)
    assert {stage["node"] for stage in info["stages"]} == {head.ip, worker.ip}
    assert f"code {TERMINATED}" in said

    assert "No nodes remaining" in ray(desk, "down", "-y", str(file))


def config_for(head: SshHost, worker: SshHost, model: Path) -> dict[str, Any]:
    """The file with what a user changes, and a link to this Python in place of `make setup`."""
    config: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    config["provider"] |= {"head_ip": head.ip, "worker_ips": [worker.ip]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    config["file_mounts"] |= {"~/orca_dist": str(ROOT), "~/model": str(model)}
    config["setup_commands"] = [
        f"mkdir -p {BIN}",
        program("ray", "ray.scripts.scripts"),
        program("orca-dist", "orca_dist"),
        config["setup_commands"][-1],
    ]
    return config


def program(name: str, module: str) -> str:
    """A command that writes a program of this name, for the machine's own copy of the code."""
    path = "export PYTHONPATH=~/orca_dist:~/orca_dist/kernels"
    text = f'#!/bin/bash\n{path}\nexec {sys.executable} -m {module} "$@"\n'
    return f"printf %s {shlex.quote(text)} > {BIN}/{name} && chmod +x {BIN}/{name}"


def ray(desk: SshHost, *arguments: str) -> str:
    return run(desk, sys.executable, "-m", "ray.scripts.scripts", *arguments)


def run(desk: SshHost, *command: str) -> str:
    """What it printed, once it has gone well."""
    done = desk.run(command, timeout_s=LIMIT_S, variables=OLD_AUTOSCALER)
    assert done.returncode == 0, done.stdout
    return done.stdout
