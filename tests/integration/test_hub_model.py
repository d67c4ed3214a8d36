"""A model of the Hub on real stages: each fetches its own part, and answers as from a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_dist import LLM, SamplingParams
from orca_dist.errors import StartupError
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.hub import REPO, LoopbackHub, loopback_hub, use_hub

PROMPT = [5, 9, 200, 31]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as hub:
        hub.repos[REPO] = loud_llama(tmp_path / "loud", max_shard_size="150KB")
        use_hub(hub, tmp_path / "hf" / "hub", monkeypatch)
        yield hub


def answer(model: str | Path) -> list[int]:
    with LLM(model, stages=2) as llm:
        (completion,) = llm.generate([PROMPT], PARAMS)
        assert llm.engine.info().name == (REPO if model == REPO else Path(model).name)
    return completion.token_ids


def test_two_stages_answer_as_from_a_folder_and_fetch_each_shard_once(hub: LoopbackHub) -> None:
    folder = hub.repos[REPO]
    assert answer(REPO) == answer(folder)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    whole = {name for name, how in hub.ranges if name in sizes and not how}
    assert whole == set(sizes)
    assert sum(1 for name, how in hub.ranges if name in sizes and not how) == len(sizes)


def test_what_a_stage_can_not_fetch_ends_the_start_in_one_line(
    hub: LoopbackHub, caplog: pytest.LogCaptureFixture
) -> None:
    index = json.loads((hub.repos[REPO] / "model.safetensors.index.json").read_text())
    last = max(index["weight_map"].values())
    whole = (hub.repos[REPO] / last).read_bytes()
    hub.swaps[last] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(StartupError, match=rf"stage \d .*{last} came with hash") as caught:
        answer(REPO)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in caplog.text
    hub.swaps.clear()
    shutil.copytree(hub.repos[REPO], hub.repos[REPO].with_name("copy"))
    assert answer(REPO) == answer(hub.repos[REPO].with_name("copy"))
