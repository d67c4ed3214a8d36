"""A workload lived and simulated: the stages wait as the table says, and both do the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orca_dist.bench.predict import Figures, Prediction
from orca_dist.cli.main import main
from tests.fixtures.checkpoints import loud_llama

TABLE = {
    "schema": 1,
    "model": "m",
    "device": "cpu",
    "stages": [{"layers": 5, "tokens": [[1, 0.01], [64, 0.03]], "sampled": [[0, 0], [1, 0.001]]}],
}


def written(folder: Path) -> Path:
    path = folder / "cost.json"
    path.write_text(json.dumps(TABLE))
    return path


def test_ratios_are_simulated_over_measured() -> None:
    measured = Figures(throughput_req_s=2.0, normalized_latency_s=0.1, ttft_s=0.5)
    simulated = Figures(throughput_req_s=1.0, normalized_latency_s=0.2, ttft_s=0.5)
    assert Prediction(measured=measured, simulated=simulated).ratio == Figures(
        throughput_req_s=0.5, normalized_latency_s=2.0, ttft_s=1.0
    )


def test_three_stages_that_wait_as_the_table_of_one_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No stage computed anything, so an iteration takes no less than the table's time."""
    folder, table = loud_llama(tmp_path / "model"), written(tmp_path)
    line = f"bench predict {folder} --cost {table} --timed --stages 3 --launcher local --device cpu"
    sizes = "--dtype float32 --requests 4 --prompt-lens 8 --output-lens 5 --json"
    assert main([*line.split(), *sizes.split()]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["schema"] == 1
    measured, simulated = document["measured"], document["simulated"]
    least_s = 3 * (0.011 + 0.01 * 4)  # five iterations of at least 10 ms on three stages
    assert measured["normalized_latency_s"] >= least_s / 5
    assert simulated["normalized_latency_s"] >= least_s / 5
    assert simulated["throughput_req_s"] <= 4 / least_s


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 2", "stages = 2: "),
        ("--timed --rate -1", "rate = -1"),
        ("--timed --requests 0", "num_requests = 0"),
        ("--cost nowhere.json", "nowhere.json can't be read as a cost table"),
        ("--timed --prompt-lens x", "prompt_lens = x"),
    ],
)
def test_bad_command_lines(
    flags: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "predict", "--cost", str(written(tmp_path)), *flags.split()]
    assert main(line) == 2
    assert message in capfd.readouterr().err
