"""Why dynamic rope ends at the model's length: beyond it there is no one answer.

Of the same ids transformers gives other logits whether a prompt came whole or in chunks, and
whether a longer request came before. Up to that length neither matters. Were this test to fail,
docs/models.md would be wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from orca_dist.config import EngineConfig
from orca_dist.engine.settle import settle_max_model_len
from orca_dist.errors import ConfigError
from orca_dist.spec import load_spec
from tests.fixtures.checkpoints import loud_model
from tests.fixtures.families import VARIANTS

MAX_LEN = 256
SHORT = [(7 * i) % 300 for i in range(MAX_LEN - 56)]
LONG = [(7 * i) % 300 for i in range(MAX_LEN + 44)]
LONGER = [(5 * i) % 300 for i in range(MAX_LEN + 200)]
ROUNDING = 1e-4
OTHER = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_model(tmp_path_factory.mktemp("dynamic"), VARIANTS["llama, rope dynamic"])


@torch.inference_mode()
def last_logits(
    model: PreTrainedModel, ids: list[int], *, chunk: int | None = None
) -> torch.Tensor:
    """At the end of `ids`, fed whole or `chunk` at a time over one cache."""
    step, cache = chunk or len(ids), None
    for start in range(0, len(ids), step):
        out = model(
            torch.tensor([ids[start : start + step]]), past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
    return out.logits[0, -1]


def fresh(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


@pytest.mark.parametrize(("ids", "matters"), [(SHORT, False), (LONG, True)])
def test_chunks(folder: Path, ids: list[int], matters: bool) -> None:
    whole, chunked = (last_logits(fresh(folder), ids, chunk=chunk) for chunk in (None, 100))
    found = difference(whole, chunked)
    assert found > OTHER if matters else found < ROUNDING


@pytest.mark.parametrize(("ids", "matters"), [(SHORT, False), (LONG, True)])
def test_what_came_before(folder: Path, ids: list[int], matters: bool) -> None:
    model = fresh(folder)
    first = last_logits(model, ids)
    last_logits(model, LONGER)
    found = difference(first, last_logits(model, ids))
    assert found > OTHER if matters else found < ROUNDING


def test_more_is_refused_and_the_limit_named(folder: Path) -> None:
    spec = load_spec(folder)
    assert settle_max_model_len(spec, EngineConfig(max_model_len=MAX_LEN)) == MAX_LEN
    with pytest.raises(ConfigError, match=r"max_model_len = 300: .*dynamic rope.*at most 256"):
        settle_max_model_len(spec, EngineConfig(max_model_len=300))
