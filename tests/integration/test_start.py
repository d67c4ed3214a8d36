"""Starting a model on real stages: what the log tells of it, and weights that are made up."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from orca_dist import LLM, SamplingParams
from orca_dist.config import Dtype, EngineConfig, Launcher, LoadFormat
from orca_dist.errors import StartupError
from tests.fixtures.checkpoints import loud_llama


def test_the_start_tells_its_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = loud_llama(tmp_path / "loud")
    caplog.set_level(logging.INFO)
    with LLM(folder, stages=2):
        pass
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if message.startswith("start: ")]
    assert any(re.fullmatch(r"KV: \d+ tokens, \d+\.\d requests of .* of 256", m) for m in messages)
    number = r"\d+\.\d"
    assert len(told) == 1
    assert re.fullmatch(
        rf"start: place {number} s, load {number} s \(1 MB read at {number}\d GB/s\), "
        rf"connect {number} s, warm up {number} s",
        told[0],
    )


def test_a_model_without_weights_serves_made_up_ones(tmp_path: Path) -> None:
    folder = loud_llama(tmp_path / "loud", tie=False)
    (folder / "model.safetensors").unlink()
    config = EngineConfig(
        load_format=LoadFormat.DUMMY, launcher=Launcher.LOCAL, dtype=Dtype.FLOAT32, kv_tokens=256
    )
    with LLM(folder, config=config) as llm:
        (answer,) = llm.generate(["Hello"], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4


def test_a_wrong_network_interface_ends_the_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo takes no list of those to leave out; links would wait for one another otherwise."""
    folder = loud_llama(tmp_path / "loud", num_layers=2)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    began_s = time.monotonic()
    told = (
        r"stage [01] \(pid \d+, node 127.0.0.1\) did not start: GLOO_SOCKET_IFNAME = \^lo fits no"
    )
    with pytest.raises(StartupError, match=rf"{told} interface of node 127.0.0.1, which has .*lo"):
        LLM(folder, stages=2)
    assert time.monotonic() - began_s < 60, "links weren't waited for"
