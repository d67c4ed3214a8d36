"""`orca-dist plan`, as a person calls it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from orca_dist.cli.main import main
from tests.integration.test_simulate_cli import LLAMA

GPT = "--layers 8 --hidden 4096 --num-requests 20 --batch-sizes 8"
SMALL = f"{GPT} --gpu a100-40gb --gpus-per-node 2 --rate 5 --slo-s 0.02"
LARGE = "--layers 96 --hidden 12288 --rate 5"  # 3.624 GB a layer, 1.235 GB an end


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCA_")]:
        monkeypatch.delenv(name)


def document(line: str, capfd: pytest.CaptureFixture[str]) -> dict:
    assert main(["plan", *line.split(), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def error_of(line: str, capfd: pytest.CaptureFixture[str], code: int = 2) -> str:
    assert main(["plan", *line.split()]) == code
    out, err = capfd.readouterr()
    assert out == ""
    (error,) = err.splitlines()
    assert error.startswith("error: ")
    return error


def test_the_document(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(SMALL, capfd)
    assert {key: found[key] for key in ("schema", "gpu", "num_devices", "rate", "slo_s")} == {
        "schema": 1,
        "gpu": "A100-40GB",
        "num_devices": 2,
        "rate": 5,
        "slo_s": 0.02,
    }
    best = found["candidates"][0]
    assert (best["stages"], best["tensor_parallel"], best["servable"]) == (1, 1, True)
    assert set(best["normalized_latency_s"]) == {"p50", "p90", "p99"}
    layer, end = 12 * 4096**2, 4096 * 50257
    assert best["split"][0]["weights_bytes"] == 2 * (8 * layer + 2 * end)
    assert best["split"][0]["kv_bytes"] == best["kv_tokens"] * 8 * 2 * 4096 * 2
    servable = [each["servable"] for each in found["candidates"]]
    assert servable == sorted(servable, reverse=True)
    assert False in servable
    assert found["no_room"] == []


def test_it_says_what_simulate_says(capfd: pytest.CaptureFixture[str]) -> None:
    """The same numbers by the same flags."""
    best = document(SMALL, capfd)["candidates"][0]
    line = "--layers 8 --hidden 4096 --gpu A100-40GB --stages 1 --max-batch-size 8 --rate 5"
    assert main(["simulate", *line.split(), "--num-requests", "20", "--json"]) == 0
    simulated = json.loads(capfd.readouterr().out)
    assert best["normalized_latency_s"] == simulated["normalized_latency_s"]
    assert best["throughput_req_s"] == simulated["throughput_req_s"]
    assert best["bubble"] == simulated["stages"][0]["bubble"]


def test_all_ranks_sharded_stages_among_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    servable = [each["servable"] for each in document(f"{SMALL} --all", capfd)["candidates"]]
    assert servable != sorted(servable, reverse=True)


def test_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL.split()]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert re.search(r"^ 1 +1 +8 +iteration balanced +met +\d", out, re.MULTILINE)
    assert re.search(r"^ 1 +2\* +8 +iteration", out, re.MULTILINE)
    assert "* serve can't run this yet" in out
    assert "First: --split even --stages 1 --max-batch-size 8 --batching iteration" in out
    assert "--forming balanced\n" in out
    assert re.search(r"^ 0 +0 +8 +4\.04 +31\.96 +0\.00 ", out, re.MULTILINE)


def test_a_row_is_all_that_top_1_prints(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL.split(), "--top", "1"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^1 of \d+; --top 0 prints all\.$", out, re.MULTILINE)
    assert "*" not in out
    assert main(["plan", *SMALL.split(), "--top", "0"]) == 0
    assert "--top 0" not in capfd.readouterr().out


def test_few_requests_are_noted(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL.replace("--rate 5", "--rate 50").split(), "--json"]) == 0
    (note,) = capfd.readouterr().err.splitlines()
    assert note == (
        "note: 20 requests are few: at 50 a second and 0.02 s a token 64 are out at once; "
        "--num-requests 258 tells better who keeps up"
    )


# ---- refusals ----------------------------------------------------------


def test_what_fits_nowhere_is_refused_with_the_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    """By hand: a layer 3.624 GB, an end 1.235 GB, 640 slots 0.0315 GB a layer. 48 layers and an
    end on 8 devices are 22.1 GB each; 20 stages are the first of 5 layers; 9 stages of two
    devices have 11 layers, 41.4 of 43.2 GB."""
    assert error_of(f"{LARGE} --gpu L4 --nodes 2", capfd) == (
        "error: the model fits no configuration of 2 x 8 L4: even as 2 stages of 8 devices a "
        "device needs 22.1 GB for weights and the longest request, and has 21.6 GB (90% of its "
        "memory), 0.486 GB too little; the fewest that would do are 18, as 9 stages of 2 "
        "devices, which serve can't run yet: it needs 20 of 1 device"
    )


def test_unsharded_stages_are_named_where_they_do(capfd: pytest.CaptureFixture[str]) -> None:
    """One layer in a device's room, two not: as many devices as layers."""
    line = "--layers 3 --hidden 12288 --gpu CPU --dtype float32 --gpus-per-node 1 --rate 1"
    assert error_of(line, capfd).endswith("the fewest that would do are 3, as 3 stages of 1 device")


def test_no_number_of_devices_may_do(capfd: pytest.CaptureFixture[str]) -> None:
    line = "--layers 4 --hidden 40960 --gpu L4 --gpus-per-node 1 --rate 1"  # 40 GB a layer
    assert error_of(line, capfd).endswith(
        "no number of them would do; take devices with more memory"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--layers 8 --hidden 4096 --rate 1", "gpu: say which devices: one of A100-40GB, "),
        (
            f"{GPT} --gpu A100 --rate 1",
            "gpu = A100: not known; did you mean H100 or A100-80GB or A100-40GB?",
        ),
        (f"{GPT} --gpu L4", "rate: say how many requests per second come"),
        (f"{GPT} --gpu L4 --rate -1", "rate = -1.0: must be more than 0"),
        (f"{SMALL} --nodes 0", "nodes = 0: must be at least 1 and at most 1024"),
        (f"{SMALL} --gpus-per-node 0", "gpus_per_node = 0: must be at least 1"),
        (f"{SMALL} --slo-s 0", "slo_s = 0.0: must be more than 0"),
        (f"{SMALL} --slo-s nan", "slo_s = nan: must be more than 0"),
        (f"{SMALL} --network-gb-s 0", "network_gb_s = 0.0: must be more than 0"),
        (f"{SMALL} --efficiency -1", "efficiency = -1.0: must be more than 0"),
        (f"{SMALL} --num-requests 1", "num_requests = 1: must be at least 10"),
        (f"{SMALL} --top -1", "top = -1: must be at least 0"),
        (f"{SMALL} --batch-sizes 8-32", "batch_sizes = 8-32: needs a list, such as 8,32,128"),
        (f"{SMALL} --batch-sizes 0", "batch_sizes = 0: needs lengths from 1"),
        (f"{SMALL} --prompt-len x", "prompt_len = x: needs lengths from 1"),
        (f"{SMALL} --output-lens 9-3", "output_lens = 9-3: the first length is the larger"),
        ("--gpu L4 --rate 1", "layers and hidden go together; give both, or MODEL"),
        ("no-such-folder --gpu L4 --rate 1", "model = no-such-folder: is not a folder"),
        (f"{SMALL} --node 2", "did you mean --gpus-per-node or --nodes?"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(line, capfd)


def test_a_folder_without_config_json_is_exit_code_3(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = error_of(f"{tmp_path} --gpu L4 --rate 1", capfd, code=3)
    assert f"{tmp_path / 'config.json'} does not exist" in error


def test_a_request_that_the_model_would_not_take(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 600}))
    assert error_of(f"{tmp_path} --gpu L4 --rate 1", capfd) == (
        "error: prompt_len = 32-512: with output_lens = 1-128 up to 640 tokens, the model takes "
        "600; shorten them"
    )
