"""`orca-dist simulate`, as a person calls it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from orca_dist.cli.main import main
from orca_dist.sim import paper_runs
from orca_dist.sim.paper_runs import BatchRow, Evaluation, Mix, OnRun, Point
from tests.unit.core.test_purity import run_blocked

CLOSED = "--output-lens 5,50,8,12,40,3,30,7 --prompt-len 1 --max-batch-size 4 --stages 1"
GPT = "--layers 96 --hidden 12288 --gpu A100-40GB --tensor-parallel 8 --stages 2"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 320,
}
FIELDS = {
    "schema",
    "throughput_req_s",
    "normalized_latency_s",
    "ttft_s",
    "tpot_s",
    "stages",
    "decode_steps",
    "slot_utilization",
    "preemptions",
}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCA_")]:
        monkeypatch.delenv(name)


def document(line: str, capfd: pytest.CaptureFixture[str]) -> dict:
    assert main(["simulate", *line.split(), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("batching", "steps", "utilization"), [("request", 90, 155 / 360), ("iteration", 50, 155 / 200)]
)
def test_request_level_against_iteration_level(
    batching: str, steps: int, utilization: float, capfd: pytest.CaptureFixture[str]
) -> None:
    found = document(f"{CLOSED} --batching {batching}", capfd)
    assert set(found) == FIELDS
    assert found["decode_steps"] == steps
    assert found["slot_utilization"] == pytest.approx(utilization)
    assert found["throughput_req_s"] == pytest.approx(8 / steps)
    assert found["stages"] == [{"busy": 1, "bubble": 0}]
    assert set(found["ttft_s"]) == {"p50", "p90", "p99"}


def test_the_table_says_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *CLOSED.split()]) == 0
    out = capfd.readouterr().out
    assert "50 decode steps, slots 78% busy, 0 preemptions" in out
    assert "8 requests, 155 tokens: 0.16 requests/s, 3.1 tokens/s" in out


def test_the_simulator_needs_none_of_the_heavy_packages(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("prompt,out\n3,2\n4,5\n")
    lines = (CLOSED, GPT + " --num-requests 5", f"--workload {tmp_path / 'w.csv'}")
    commands = [f"simulate {line}" for line in lines]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    commands.append(f"plan {tmp_path} --gpu L4 --gpus-per-node 2 --rate 1 --num-requests 10")
    runs = "; ".join(f"codes.append(main({line.split()!r}))" for line in commands)
    code = f"codes = []; from orca_dist.cli.main import main; {runs}; assert codes == [0] * 4"
    blocked = ("torch", "ray", "grpc", "numpy", "google", "tokenizers", "matplotlib")
    done = run_blocked(code, *blocked)
    assert done.returncode == 0, done.stderr


def test_rates_give_a_point_each(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(f"{GPT} --rates 0.5,4 --num-requests 60", capfd)
    slow, fast = found["points"]
    assert (slow["rate"], fast["rate"]) == (0.5, 4)
    assert set(slow) == FIELDS - {"schema"} | {"rate"}
    assert fast["throughput_req_s"] > slow["throughput_req_s"]
    assert fast["normalized_latency_s"]["p50"] > slow["normalized_latency_s"]["p50"]
    assert main(["simulate", *GPT.split(), "--rates", "0.5,4", "--num-requests", "60"]) == 0
    assert len(re.findall(r"^ (?:0\.5|4) .*%", capfd.readouterr().out, re.MULTILINE)) == 2


def test_shapes_come_from_a_models_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    line = f"--gpu L4 --efficiency 1 --stages 2 {CLOSED.replace('--stages 1', '')}"
    found = document(f"{tmp_path} {line}", capfd)
    layer_bytes = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    least_s = 4 * layer_bytes / 300e9  # the stages read all layers
    assert least_s < found["tpot_s"]["p50"] < 1.05 * least_s


def test_costs_come_from_a_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"schema": 1, "stages": [{"tokens": [[1, 2.0]]}]}))
    found = document(f"{CLOSED} --cost {path}", capfd)
    assert found["throughput_req_s"] == pytest.approx(8 / 100)


def test_the_servers_settings_are_the_simulators_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server's file does for its simulation, keys that only matter to a server included."""
    path = tmp_path / "orca.yaml"
    path.write_text("stages: 1\nmax_batch_size: 4\nbatching: request\nport: 1\nlauncher: local\n")
    line = f"--config {path} --output-lens 5,50,8,12,40,3,30,7 --prompt-len 1"
    assert document(line, capfd)["decode_steps"] == 90


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rate -1", "rate = -1.0: must be more than 0"),
        ("--rates 1,x", "rates = 1,x: needs numbers"),
        ("--rates 1,-2", "rate = -2.0: must be more than 0"),
        ("--rates 1 --rate 2", "rates = 1: can't go with rate"),
        ("--output-lens 0", "output_lens = 0: needs lengths from 1"),
        ("--prompt-len 9-3", "prompt_len = 9-3: the first length is the larger"),
        ("--num-requests 0", "num_requests = 0: must be at least 1"),
        ("--clients 0", "clients = 0: must be at least 1"),
        ("--reserve-len 0", "reserve_len = 0: must be at least 1"),
        ("--stages 0", "stages = 0: must be at least 1"),
        ("--stage-s 0", "stage_s = 0.0: must be more than 0"),
        ("--stage-s nan", "stage_s = nan: must be more than 0"),
        ("--token-latency-s -1", "token_latency_s = -1.0: must be 0 or more"),
        ("--layers 4 --hidden 256 --gpu A100", "gpu = A100: not known; did you mean"),
        ("--layers 4 --hidden 256", "gpu: a model needs one of A100-40GB"),
        ("--gpu H100", "gpu = H100: needs MODEL, or --layers and --hidden"),
        ("--layers 4 --gpu H100", "layers and hidden go together"),
        ("--layers 1 --hidden 200 --gpu H100", "hidden = 200: must be a multiple of 128"),
        ("--layers 1 --hidden 256 --gpu H100", "stages = 2: a model of 1 layers takes 1 to 1"),
        ("--layers 96 --hidden 12288 --gpu L4", "stage 0: its weights take"),
        ("no-such-folder --gpu H100", "model = no-such-folder: is not a folder"),
        ("--json paper", "paper goes first: orca-dist simulate paper"),
        ("--workload no/such.csv", "no/such.csv can't be read"),
        ("--cost no/such.json", "no/such.json can't be read as a cost table"),
        ("--cost x.json --gpu H100", "cost = x.json: says it all"),
        ("--kv-tokens 100", "the longest request needs"),
        ("--plot x.gif", "plot = x.gif: the name has to end in .png"),
        ("--plot no/such/x.png", "plot = no/such/x.png: there is no folder no/such"),
        ("--batchng request", "did you mean --batching?"),
        ("paper --num-requests 0", "num_requests = 0: must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *line.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    (error,) = err.splitlines()
    assert error.startswith("error: ")
    assert message in error


def test_a_malformed_line_of_a_trace_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.csv"
    path.write_text("prompt,out\n1,2\n1,-2\n")
    assert main(["simulate", "--workload", str(path)]) == 2
    assert capfd.readouterr().err.startswith(f"error: {path}: line 3: out = -2: needs")
    assert main(["simulate", "--workload", str(path), "--rate", "1"]) == 2
    assert "rate: the file" in capfd.readouterr().err


@pytest.mark.parametrize("more", ["", "--rates 1,2"])
@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_pictures_are_drawn(
    name: str, more: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    line = f"--num-requests 4 --output-lens 1-4 {more} --plot {path}"
    assert document(line, capfd)["schema"] == 1
    starts = {".png": b"\x89PNG", ".svg": b"<?xml"}
    assert path.read_bytes().startswith(starts[path.suffix])


def test_a_picture_without_matplotlib_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orca_dist.sim.plot.find_spec", lambda name: None)
    assert main(["simulate", "--plot", str(tmp_path / "x.png")]) == 2
    assert "needs matplotlib; pip install 'orca-dist[plot]'" in capfd.readouterr().err


# ---- the paper ---------------------------------------------------------


def test_the_papers_headline_points_the_papers_way() -> None:
    """Few requests, only the direction: the table of docs/simulator.md has the numbers."""
    mix, cost = Mix(num_requests=40), paper_runs.paper.MODELS["101b"].cost()
    point = paper_runs.peaks(mix, cost)
    assert point.ratio is not None
    assert point.ratio > 5


def test_what_misses_the_target_even_idle_has_no_throughput_at_it() -> None:
    slow = paper_runs.paper.MODELS["341b"].cost(0.05)
    assert paper_runs.throughput_at(Mix(num_requests=5), paper_runs.paper.orca(slow), 1.0) == 0


def test_paper_prints_points(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def evaluate(mix: Mix, on_run: OnRun) -> Evaluation:
        on_run("something")
        point = Point(orca_req_s=6.0, ft_req_s=0.2)
        row = BatchRow(peak_req_s=1.0, at_target_req_s=0.5, latency_s=0.1)
        return Evaluation(
            points={"175b_at_190ms": point},
            sensitivity={0.75: Point(orca_req_s=5.0, ft_req_s=0.0)},
            orca_batches={8: row},
            ft_batches={(8, 8): row},
            homogeneous={"orca(1)": 0.3},
        )

    monkeypatch.setattr("orca_dist.cli.simulate_paper.evaluate", evaluate)
    assert main(["simulate", "paper", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["points"]["175b_at_190ms"] == pytest.approx(
        {"orca_req_s": 6.0, "ft_req_s": 0.2, "ratio": 30}
    )
    assert found["sensitivity"]["0.75"]["ratio"] is None
    assert found["ft_batches"] == {
        "8,8": {"peak_req_s": 1.0, "at_target_req_s": 0.5, "latency_s": 0.1}
    }
    assert main(["simulate", "paper"]) == 0
    assert re.search(r"175b_at_190ms +6 +6\.81 +0\.2 +0\.185 +30 +36\.8", capfd.readouterr().out)
