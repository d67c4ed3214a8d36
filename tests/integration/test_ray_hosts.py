"""A Ray cluster of several hosts, each with a network of its own, and a cable that is pulled out.

`serve` runs on the head's host as a user starts it. A host that is cut off takes its stage with
it: the stage goes to a host that joins meanwhile, and the answer that was being given goes on.
When the next one is cut off and none joins, the command ends and says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from orca_dist import LLM, SamplingParams
from tests.fixtures import streamed
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.hosts import Host, hosts
from tests.fixtures.ray_nodes import RayNodes, join_as_driver, ray_nodes
from tests.fixtures.serving import Serving, all_serving, command, gone, serve_command

pytestmark = [
    pytest.mark.ray,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

PORT = 6379  # free in a network of its own
NUM_TOKENS = 1500
RECOVERY_S = 45
LOST = 4
GONE_WITHIN_S = 15.0
QUICK = {"RAY_health_check_timeout_ms": "1500", "RAY_health_check_failure_threshold": "3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"), max_model_len=2048)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The answer of one stage on one host."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=7)
    with LLM(folder, stages=1) as llm:
        (answer,) = llm.generate([streamed.PROMPT], params)
    return [str(token) for token in answer.token_ids]


def test_three_hosts_of_which_two_are_cut_off(
    folder: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosts(4) as (head, second, third, spare), cluster_on(head, second, third) as cluster:
        join_as_driver(cluster, monkeypatch)
        with served(head, cluster, folder) as server:
            before = nodes_of_stages(head, server)
            assert sorted(before) == [head.ip, second.ip, third.ip]

            with streaming(head, server) as client:
                first = next(client.stdout)  # type: ignore[call-overload, arg-type]
                third.cut()
                cluster.start(spare.ip, "--num-cpus", "1", inside=spare.inside)
                rest, _ = client.communicate(timeout=2 * RECOVERY_S)
            assert (client.returncode, (first + rest).split()) == (0, expected)
            after = nodes_of_stages(head, server)
            assert after == [spare.ip if node == third.ip else node for node in before]

            stages = server.children()
            with streaming(head, server) as client:
                next(client.stdout)  # type: ignore[call-overload]
                second.cut()
                code, err = server.end(2 * RECOVERY_S)
                rest, _ = client.communicate(timeout=GONE_WITHIN_S)
            assert (client.returncode, rest.split()[-1]) == (1, "pipeline_lost")
        last = err.splitlines()[-1]
        assert (code, "Traceback" in err) == (LOST, False)
        assert f"within recovery_timeout_s = {RECOVERY_S} s: stages " in last
        assert "Ray has no node for stages [" in last
        assert f"{head.ip} has 0 of 1 CPU free; {spare.ip} has 0 of 1 CPU free" in last
        assert gone(stages, GONE_WITHIN_S)


@contextmanager
def cluster_on(head: Host, *others: Host) -> Iterator[RayNodes]:
    """A node with one CPU on each host."""
    flags = ("--num-cpus", "1")
    with ray_nodes(head.ip, *flags, inside=head.inside, port=PORT, variables=QUICK) as cluster:
        for other in others:
            cluster.start(other.ip, *flags, inside=other.inside)
        yield cluster


@contextmanager
def served(head: Host, cluster: RayNodes, folder: Path) -> Iterator[Serving]:
    flags = f"--launcher ray --ray-address {cluster.address} --stages 3 --heartbeat-s 2".split()
    limits = ("--recovery-timeout-s", str(RECOVERY_S), "--kv-tokens", "4096")
    with all_serving([[*head.inside, *serve_command(folder, *flags, *limits)]]) as (server,):
        yield server


@contextmanager
def streaming(head: Host, server: Serving) -> Iterator[subprocess.Popen[str]]:
    """A client on the head's host, which prints tokens."""
    arguments = ["-m", "tests.fixtures.streamed", server.address, str(NUM_TOKENS)]
    client = subprocess.Popen(
        [*head.inside, sys.executable, *arguments], stdout=subprocess.PIPE, text=True
    )
    with ExitStack() as ending:
        ending.callback(client.communicate)
        ending.callback(client.kill)
        yield client


def nodes_of_stages(head: Host, server: Serving) -> list[str]:
    """As `info` tells them, stage by stage."""
    asked = [*head.inside, *command("info", "--address", server.address, "--json")]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    return [stage["node"] for stage in json.loads(told.stdout)["stages"]]
