"""`orca-dist bench serve`: against a real front with known tokens, and against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from orca_dist.bench.attempt import Attempt
from orca_dist.bench.load_report import make_report
from orca_dist.bench.serve import NUM_CONNECTIONS, ServeBench, connected
from orca_dist.cli.main import main
from orca_dist.core import Request
from orca_dist.errors import ConfigError
from orca_dist.sim.lengths import Lengths
from orca_dist.sim.workload import Arrivals, Workload, WorkloadRequest, make_workload
from tests.fixtures.checkpoints import byte_tokenizer, letter, script_llama
from tests.fixtures.foreign_port import answering
from tests.fixtures.front import run, serving
from tests.fixtures.scripted_engine import FAILING, ScriptedEngine
from tests.fixtures.serving import serving as server_process

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCA_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tokenizer alone."""
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server of one stage whose every second token is the end of sequence."""
    ends = {letter("A"): 2, 2: letter("A")}
    model = script_llama(tmp_path_factory.mktemp("model"), lambda token: ends.get(token, 2))
    with server_process(model, "--stages", "1") as server:
        yield server.address


class CountingEngine(ScriptedEngine):
    """Notes the most requests that were live at once."""

    most_live = 0

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.most_live = max(self.most_live, self.num_live)


def requests_of(*pairs: tuple[int | str | tuple[int, ...], int]) -> Workload:
    return Workload(
        requests=tuple(
            WorkloadRequest(id=index, prompt=prompt, out=out)
            for index, (prompt, out) in enumerate(pairs)
        )
    )


async def attempts_of(address: str, *workloads: Workload) -> list[list[Attempt]]:
    bench = ServeBench(address, workloads, seed=0)
    await bench.run()
    return bench.results()


def errors_of(arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the one line of a run that fails."""
    code = main(["bench", "serve", *arguments.split()])
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return code, line


def error_of_a_process(arguments: str) -> str:
    """As errors_of, where gRPC is used: events of this process's earlier loops make it log."""
    command = [sys.executable, "-m", "orca_dist", "bench", "serve", *arguments.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    return line


# ---- how requests go out -----------------------------------------------


def test_arrivals_never_wait_for_answers(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(paused=True, max_running=300)
        async with serving(engine, folder, max_queue=300) as (server, _):
            task = asyncio.create_task(attempts_of(server.address, requests_of(*[(3, 2)] * 250)))
            assert await asyncio.to_thread(engine.wait_for, lambda: len(engine.submitted) == 250)
            engine.resume()
            (attempts,) = await task
        assert [each.error for each in attempts] == [""] * 250
        assert all(len(each.token_s) == 2 and each.due_s == 0.0 for each in attempts)

    run(case())


def test_clients_bound_how_many_are_out(folder: Path) -> None:
    async def case() -> None:
        engine = CountingEngine()
        async with serving(engine, folder) as (server, _):
            workload = Workload(requests=requests_of(*[(3, 5)] * 20).requests, clients=3)
            (attempts,) = await attempts_of(server.address, workload)
        assert engine.most_live == 3
        assert most_out(attempts) == 3
        assert attempts[3].due_s >= min(each.ended_s or 0.0 for each in attempts[:3])

    run(case())


def test_every_connection_is_one_of_its_own(folder: Path) -> None:
    async def case() -> None:
        async with serving(ScriptedEngine(), folder) as (server, _), connected(server.address):
            port = int(server.address.rpartition(":")[2])
            accepted = [
                each
                for each in psutil.Process().net_connections("tcp")
                if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
            ]
        assert len(accepted) == NUM_CONNECTIONS

    run(case())


def most_out(attempts: Sequence[Attempt]) -> int:
    changes = [(each.sent_s, 1) for each in attempts]
    changes += [(each.ended_s or 0.0, -1) for each in attempts]
    num_out = most = 0
    for _, change in sorted(changes):
        num_out += change
        most = max(most, num_out)
    return most


def test_a_full_queue_and_a_failed_request_are_counted(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine({7: FAILING}, paused=True)
        workloads = requests_of(*[((5,), 4)] * 10), requests_of(((7,), 4))
        async with serving(engine, folder, max_queue=4) as (server, _):
            bench = ServeBench(server.address, workloads, seed=0)
            task = asyncio.create_task(bench.run())
            while (
                not bench.runs
                or sum(each.ended_s is not None for each in bench.runs[0].attempts) < 6
            ):
                await asyncio.wait([task], timeout=0.05)
            engine.resume()
            await task
        many, failing = (make_report(attempts) for attempts in bench.results())
        assert (many.requests, many.completed) == (10, 4)
        assert many.errors == {"RESOURCE_EXHAUSTED": 6}
        assert failing.errors == {"INTERNAL": 1}

    run(case())


def test_what_is_sent_is_the_workload(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        workload = requests_of(((5, 6), 3), ("AB", 1), (4, 2))
        async with serving(engine, folder) as (server, client):
            await attempts_of(server.address, workload, workload)
            ids = await client.tokenize("AB")
        prompts = sorted(request.prompt for request in engine.submitted if len(request.prompt) < 4)
        assert prompts == sorted([(5, 6), ids] * 2)
        one, other = [request for request in engine.submitted if len(request.prompt) == 4]
        assert one.prompt != other.prompt, "a second run isn't in the prefix cache"
        assert {request.max_tokens for request in engine.submitted} == {1, 2, 3}
        assert not any(request.stop_ids for request in engine.submitted), "EOS ends no answer"

    run(case())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ((60, 5), "request 1 of the workload: prompt 60 and out 5 are more than the server's "
         "max_model_len, 64 tokens"),
        (((5, 315), 2), "request 1 of the workload: its token ids are not all in the server's "
         "vocabulary, 0 to 314"),
    ],
)  # fmt: skip
def test_what_can_not_be_answered_is_refused_before_anything_is_sent(
    folder: Path, request_: tuple[int, int], message: str
) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with serving(engine, folder) as (server, _):
            with pytest.raises(ConfigError, match=message):
                await attempts_of(server.address, requests_of((60, 4), request_))
        assert engine.submitted == []

    run(case())


def test_an_interrupted_run_reports_what_it_has(folder: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(max_model_len=100_000)
        async with serving(engine, folder, max_queue_tokens=100_000) as (server, _):
            flags = "--requests 4 --clients 2 --output-lens 1,1,50000,50000"
            line = f"bench serve {flags} --address {server.address}"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "orca_dist", *line.split(), "--json",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            all_sent = asyncio.to_thread(
                engine.wait_for, lambda: len(engine.submitted) == 4, WAIT_S
            )
            assert await all_sent, "so the first two have their answers"
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            assert await asyncio.to_thread(engine.wait_for, lambda: engine.num_live == 0)
        assert process.returncode == 130, err
        document = json.loads(out)
        assert document["interrupted"]
        assert (document["completed"], document["unfinished"]) == (2, 2)

    run(case())


# ---- against a server with stages --------------------------------------


def test_a_rate_is_kept_and_reported(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        f"bench serve --address {address} --rate 40 --requests 20 --prompt-lens 3-9 "
        "--output-lens 1-6 --seed 1 --slo-ttft-s 1000 --slo-tpot-s 1000 --json"
    )
    assert main(line.split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["interrupted"]) == (1, False)
    assert (document["requests"], document["completed"], document["errors"]) == (20, 20, {})
    workload = make_workload(
        num_requests=20,
        prompt_lens=Lengths(low=3, high=9),
        output_lens=Lengths(low=1, high=6),
        arrivals=Arrivals(rate=40),
        seed=1,
    )
    assert document["output_tokens"] == sum(request.out for request in workload.requests)
    times_s = [request.at_s for request in workload.requests]
    assert document["duration_s"] >= times_s[-1] - times_s[0]
    assert document["throughput_req_s"] == pytest.approx(20 / document["duration_s"])
    assert document["goodput"]["share"] == 1.0
    assert document["goodput"]["slo"] == {"ttft_s": 1000.0, "tpot_s": 1000.0}
    for name in ("normalized_latency_s", "ttft_s", "tpot_s", "inter_token_s", "latency_s"):
        assert 0 <= document[name]["p50"] <= document[name]["p90"] <= document[name]["p99"]


def test_requests_go_out_when_they_are_due(address: str) -> None:
    workload = make_workload(
        num_requests=20,
        prompt_lens=Lengths(low=3, high=9),
        output_lens=Lengths(low=4, high=4),
        arrivals=Arrivals(rate=50, cv=3),
        seed=2,
    )
    (attempts,) = asyncio.run(attempts_of(address, workload))
    assert [each.due_s for each in attempts] == [request.at_s for request in workload.requests]
    for each in attempts:
        times_s = [each.due_s, each.sent_s, *each.token_s, each.ended_s or 0.0]
        assert all(before <= after for before, after in pairwise(times_s))
        assert len(each.token_s) == 4


def test_a_workload_file_with_three_clients(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [{"prompt": n, "out": 2} for n in range(1, 8)] + [{"prompt": "Hello", "out": 3}]
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"requests": requests}), encoding="utf-8")
    line = f"bench serve --address {address} --workload {path} --clients 3"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 of 8 requests answered, 3 clients, in ")
    assert "goodput" not in out


def test_several_rates_make_a_curve(
    address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = (
        f"bench serve --address {address} --rates 50,200 --requests 6 --prompt-lens 3-9 "
        "--output-lens 1-4 --seed 3"
    )
    assert main([*line.split(), "--json"]) == 0
    document = capfd.readouterr().out
    assert [point["rate"] for point in json.loads(document)["points"]] == [50.0, 200.0]
    (tmp_path / "before.json").write_text(document, encoding="utf-8")
    picture = tmp_path / "curve.png"
    again = f"{line} --plot {picture} --compare {tmp_path / 'before.json'}"
    assert main(again.split()) == 0
    head, *rows = capfd.readouterr().out.splitlines()
    assert head.split()[0] == "offered"
    assert [row.split()[:4] for row in rows] == [
        [rate, "requests/s", "6", "0"] for rate in ("50", "200")
    ]
    assert picture.stat().st_size > 5000


def test_cached_prompts_are_warned_of(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    line = (
        f"bench serve --address {address} --requests 2 --prompt-lens 100 --output-lens 1 --seed 4"
    )
    assert main(line.split()) == 0
    assert "cached" not in capfd.readouterr().err
    assert main(line.split()) == 0
    assert "cached, as of an earlier run with --seed 4; take another" in capfd.readouterr().err


# ---- what is wrong -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate -1", "rate = -1.0: must be more than 0"),
        ("--rate 0", "rate = 0.0: must be more than 0"),
        ("--rate nan", "rate = nan: must be more than 0"),
        ("--rates 1,-2", "rate = -2.0: must be more than 0"),
        ("--rates 1;2", "rates = 1;2: needs numbers, such as 1,2,4"),
        ("--rates 1, --rate 2", "rates = 1,: can't go with rate; leave one out"),
        ("--rate 1 --clients 2", "clients = 2: send when an answer is there, not at a rate"),
        ("--rates 1,2 --clients 2", "clients = 2: send when an answer is there, not at a rate"),
        ("--clients 0", "clients = 0: must be at least 1"),
        ("--rate 1 --cv -1", "cv = -1.0: must be at least 0"),
        ("--cv 2", "cv = 2.0: varies a rate; give --rate or --rates"),
        ("--requests 0", "requests = 0: must be at least 1"),
        ("--prompt-lens 9-3", "prompt_lens = 9-3: the first length is the larger"),
        ("--output-lens x", "output_lens = x: needs lengths from 1"),
        ("--slo-ttft-s 0", "slo_ttft_s = 0.0: must be more than 0, and finite"),
        ("--slo-tpot-s inf", "slo_tpot_s = inf: must be more than 0, and finite"),
        ("--workload nowhere.json", "nowhere.json can't be read"),
        ("--workload w.json --rate 1", "rate: the file w.json says it; leave one out"),
        ("--workload w.json --requests 1", "requests: the file w.json says it; leave one out"),
        ("--workload w.json --output-lens 1", "output_lens: the file w.json says it"),
        ("--plot out.gif", "out.gif: the name has to end in .png or .svg"),
        ("--compare a.json", "compare: needs --rates and --plot"),
        ("--address nowhere", "address = nowhere: needs host:port"),
        ("--rat 1", "did you mean --rate"),
    ],
)
def test_bad_command_lines(arguments: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, line = errors_of(arguments, capfd)
    assert code == 2
    assert line.startswith("error: ")
    assert message in line


def test_no_server_and_a_foreign_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{probe.getsockname()[1]}"
        message = error_of_a_process(f"--address {nowhere}")
    assert message.startswith(f"error: no orca-dist server answers at {nowhere}")
    with answering() as foreign:
        assert foreign in error_of_a_process(f"--address {foreign}")


def test_the_address_may_come_from_the_environment(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCA_ADDRESS", "elsewhere")
    assert errors_of("", capfd)[1].startswith("error: address = elsewhere: needs host:port")
