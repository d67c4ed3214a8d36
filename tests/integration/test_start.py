"""Starting a model on real stages: what the log tells of it, and weights that are made up."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from orca_dist import LLM, SamplingParams
from orca_dist.config import Dtype, EngineConfig, Launcher, LoadFormat
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
