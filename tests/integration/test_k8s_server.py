"""The command of the server's pod, as the manifest has it, beside a real Ray head."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from orca_dist.client import Client, Tls
from orca_dist.params import SamplingParams
from tests.fixtures.certificates import Certificates
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.kustomized import kustomized
from tests.fixtures.ray_heads import ray_started
from tests.unit.test_manifests import FOLDER, of_kind, templates

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KEY = "k" * 32
HEAD = "orca-head-svc:6379"
END_S = 60.0


def settings(text: str, folder: Path, pems: Certificates) -> str:
    """The manifest's, of a small model, a free port, and files that are here."""
    config = pems.server(names=("orca-server",))
    keys = folder / "keys"
    keys.write_text(f"me:{KEY}\n")
    changes = {
        "model": loud_llama(folder / "loud"),
        "port": 0,
        "api_keys_file": keys,
        "tls_cert": config.tls_cert,
        "tls_key": config.tls_key,
    }
    for name, value in changes.items():
        text, count = re.subn(rf"(?m)^{name}: .*$", f"{name}: {value}", text)
        assert count == 1, name
    return text


def environment_of_a_pod(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The token comes in a file; commands are those of this Python."""
    token = folder / "token"
    token.write_text(environment["RAY_AUTH_TOKEN"])
    path = os.pathsep.join((sysconfig.get_path("scripts"), environment["PATH"]))
    kept = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"}
    return kept | {"RAY_AUTH_TOKEN_PATH": str(token), "PATH": path}


def test_it_joins_serves_is_healthy_and_ends(tmp_path: Path) -> None:
    objects = kustomized(FOLDER / "base")
    (container,) = templates(objects)["server"]["spec"]["containers"]
    (config_map,) = of_kind(objects, "ConfigMap")
    pems = Certificates(tmp_path)
    config = tmp_path / "orca.yaml"
    config.write_text(settings(config_map["data"]["orca.yaml"], tmp_path, pems))
    (script,) = container["args"]
    assert container["command"][2] == "bash"
    with ray_started([("127.0.0.1", {})], "token", num_cpus=4) as (address, environment):
        script = script.replace(HEAD, address).replace("/etc/orca/config/orca.yaml", str(config))
        own = environment_of_a_pod(environment, tmp_path)
        with subprocess.Popen(
            [*container["command"][2:], script], stdout=subprocess.PIPE, text=True, env=own
        ) as server:
            try:
                address = _ready(server)
                _serves(address, pems)
                assert _probe(container, address, pems, own) == 0
                server.send_signal(signal.SIGTERM)
                assert server.wait(END_S) == 128 + signal.SIGTERM
                assert _probe(container, address, pems, own) == 1
            finally:
                server.kill()


def _ready(server: subprocess.Popen[str]) -> str:
    """What the server prints, behind what `ray start` says."""
    assert server.stdout is not None
    line = next(line for line in server.stdout if line.startswith("ready "))
    return f"127.0.0.1:{line.rpartition(':')[2].strip()}"


def _serves(address: str, pems: Certificates) -> None:
    tls = Tls(ca=pems.ca, server_name="orca-server")
    with Client(address, api_key=KEY, tls=tls) as client:
        assert len(client.generate([5, 9, 17], SamplingParams(max_tokens=4)).token_ids) == 4
        nodes = {stage.actor_id for stage in client.info(timeout_s=30).stages}
        assert len(nodes) == 2


def _probe(
    container: dict, address: str, pems: Certificates, environment: Mapping[str, str]
) -> int:
    """The readiness probe's own command, at this address."""
    python, *words = container["readinessProbe"]["exec"]["command"]
    assert python == "python"
    words = [word.replace("/etc/orca/tls/ca.crt", str(pems.ca)) for word in words]
    command = [sys.executable, *words, "--address", address]
    return subprocess.run(command, env=dict(environment), timeout=60, check=False).returncode
