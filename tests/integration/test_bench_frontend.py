"""bench frontend on real servers: its window's figures agree, and its processes are gone after."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from orca_dist.bench.blank_server import BlankServer
from orca_dist.bench.frontend import run_frontend, serving
from orca_dist.cli.main import main
from orca_dist.client import AsyncClient
from orca_dist.errors import StartupError
from orca_dist.params import SamplingParams
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.front import run
from tests.fixtures.serving import gone

END_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("model"), max_model_len=4096)


def test_two_numbers_of_streams_on_two_stages(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = "--streams 2 6 --stages 2 --wait-s 0.005 --duration-s 0.5 --json"
    assert main(["bench", "frontend", str(folder), *flags.split()]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == 1
    assert [(row["stages"], row["streams"]) for row in document["rows"]] == [(2, 2), (2, 6)]
    for row in document["rows"]:
        parts = [row[f"{name}_ms"] for name in ("front", "master", "control", "grpc")]
        assert row["cpu_ms"] == pytest.approx(sum(parts))
        assert all(part > 0 for part in parts[:3])
        assert row["wall_ms"] >= 5.0, "a stage waits 5 ms over each plan"
        assert 1 <= row["batch"] <= row["streams"]
        assert 0 < row["messages"] <= 1.5 * row["batch"], "a message has a token or more"
        assert row["generator_ms"] > 0
    assert document["max_streams"] == [{"stages": 2, "streams": 6}]


def test_a_blank_server_answers_in_full_and_leaves_nothing_behind(folder: Path) -> None:
    command = BlankServer(model=str(folder), stages=3, streams=4, max_len=64, wait_s=0.0)

    async def case() -> list[psutil.Process]:
        async with serving(command) as server:
            children = psutil.Process().children(recursive=True)
            async with AsyncClient(server.address) as client:
                params = SamplingParams(max_tokens=9, ignore_eos=True)
                await server.start_window()
                answer = await client.generate([5] * 7, params)
            spent = await server.stop_window()
        assert len(answer.token_ids) == len(set(answer.token_ids)) == 9
        assert spent.tokens == 9
        return children

    children: list[psutil.Process] = []

    async def keep() -> None:
        children.extend(await case())

    run(keep())
    assert len(children) == 4, "the server and its stages"
    assert gone(children, END_S)


def test_a_bench_that_is_cancelled_ends_its_server(folder: Path) -> None:
    children: list[psutil.Process] = []

    async def case() -> None:
        first_row = asyncio.Event()
        work = run_frontend(
            folder,
            stages=[1],
            streams=[1, 2],
            wait_s=0.005,
            duration_s=0.5,
            on_progress=lambda done, total: first_row.set() if done else None,
        )
        bench = asyncio.create_task(work)
        await asyncio.wait_for(first_row.wait(), 60)
        children.extend(psutil.Process().children(recursive=True))
        bench.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bench

    run(case())
    assert len(children) == 2, "the server and its stage"
    assert gone(children, END_S)


def test_a_server_that_can_not_start_is_told(tmp_path: Path) -> None:
    command = BlankServer(model=str(tmp_path), stages=1, streams=1, max_len=64, wait_s=0.0)

    async def case() -> None:
        with pytest.raises(StartupError, match="the server of the bench has ended"):
            async with serving(command):
                pass

    run(case())
