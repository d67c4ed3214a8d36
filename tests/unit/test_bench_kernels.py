"""bench kernels: what it times is the same work twice, in turns; how long it takes is no test's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orca_dist.bench.kernels import (
    KERNELS,
    SHAPES,
    Setting,
    Shape,
    Times,
    measure,
    take_turns,
    times,
)
from orca_dist.cli.main import main
from orca_dist.spec import load_spec
from tests.fixtures.checkpoints import loud_llama

SMALL = Shape(name="small", spans=((37, 1), (3, 20), (0, 5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_and_reference_do_the_same_work(name: str, dtype: torch.dtype, folder: Path) -> None:
    setting = Setting(spec=load_spec(folder), shape=SMALL, dtype=dtype, num_threads=1)
    contest = KERNELS[name](setting)
    torch.testing.assert_close(contest.kernel(), contest.reference(), atol=2e-2, rtol=2e-2)


def test_calls_take_turns() -> None:
    heard: list[str] = []

    def call(name: str) -> Callable[[], None]:
        def slow() -> None:
            heard.append(name)
            torch.randn(500, 500) @ torch.randn(500, 500)

        return slow

    assert len(take_turns([call("a"), call("b")], rounds=3)) == 2
    timed = "".join(heard).replace("aa", "a")
    while "aa" in timed or "bb" in timed:  # a sample may repeat its call
        timed = timed.replace("aa", "a").replace("bb", "b")
    assert timed == "ab" * 4, "once to see how long they take, then a round each"


def test_quartiles_stand_around_the_median() -> None:
    assert times([5.0, 1.0, 2.0, 4.0, 3.0]) == Times(median=3.0, low=2.0, high=4.0)
    assert times([7.0]) == Times(median=7.0, low=7.0, high=7.0)


def test_there_is_a_row_for_each_setting(folder: Path) -> None:
    heard: list[tuple[int, int]] = []
    rows = measure(
        load_spec(folder),
        kernels=["attention"],
        dtypes=["float32", "bfloat16"],
        threads=[1, 2],
        rounds=2,
        shapes=[SMALL],
        on_progress=lambda done, total: heard.append((done, total)),
    )
    settings = [(row.threads, row.dtype) for row in rows]
    assert settings == [(n, d) for n in (1, 2) for d in ("float32", "bfloat16")]
    assert heard == [(done, 4) for done in range(4)]
    for row in rows:
        assert row.ratio == row.reference_us.median / row.kernel_us.median


def test_shapes_are_what_their_names_say() -> None:
    rows = {shape.name: shape.num_rows for shape in SHAPES}
    assert (rows["decode 1 at 64"], rows["decode 16 at 2048"]) == (1, 16)
    assert (rows["prefill 512"], rows["mixed"]) == (512, 15 + 256)
    assert all(start + length <= 2048 for shape in SHAPES for start, length in shape.spans)


def test_the_command_prints_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rounds", "1", "--dtypes", "float32", "--json"]
    assert main(["bench", "kernels", str(folder), *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert len(document["rows"]) == len(KERNELS) * len(SHAPES)
    assert set(document["rows"][0]["kernel_us"]) == {"median", "low", "high"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kernels atention", "kernels = atention: choose of attention"),
        ("--dtypes float16", "dtypes = float16: choose of float32, bfloat16"),
        ("--threads 0", "threads = 0: must be at least 1"),
        ("--rounds 0", "rounds = 0: must be at least 1"),
    ],
)
def test_bad_command_lines(flags: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *flags.split()]) == 2
    assert message in capfd.readouterr().err
