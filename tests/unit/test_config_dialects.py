"""config.json as transformers 4 wrote it and as 5 does: the same model, of every variant.

Older files have torch_dtype, and rope_theta with rope_scaling; newer ones dtype and
rope_parameters.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from orca_dist.spec import load_spec, parse_spec
from tests.fixtures.checkpoints import loud_model
from tests.fixtures.families import VARIANTS

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}


def newer(name: str) -> dict[str, Any]:
    """As the installed transformers writes it."""
    from transformers import AutoConfig

    document = copy.deepcopy({**SIZES, **VARIANTS[name]})
    document.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 5e5})
    return dict(AutoConfig.for_model(**document).to_dict())


def older(document: dict[str, Any], type_key: str) -> dict[str, Any]:
    """The same in the older dialect; the type of rope was once `type`, then `rope_type`."""
    kept = {key: value for key, value in document.items() if key != "rope_parameters"}
    rope = dict(document["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if kind == "default" else {**rope, type_key: kind}
    kept["torch_dtype"] = kept.pop("dtype")
    return {**kept, "rope_theta": theta, "rope_scaling": scaling}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_both_dialects_say_the_same(name: str) -> None:
    document = newer(name)
    assert document["rope_parameters"]["rope_theta"] in (10000.0, 5e5)
    spec = parse_spec(document)
    assert spec.dtype == "bfloat16"
    for type_key in ("type", "rope_type"):
        assert parse_spec(older(document, type_key)) == spec


@pytest.mark.parametrize("name", list(VARIANTS))
def test_transformers_reads_the_older_dialect_as_the_newer(name: str) -> None:
    """So that the translation above is the one that older files were written by."""
    from transformers import AutoConfig

    document = newer(name)
    read = AutoConfig.for_model(**copy.deepcopy(older(document, "rope_type")))
    assert parse_spec(read.to_dict()) == parse_spec(document)


def test_a_saved_folder_is_of_the_newer_dialect(tmp_path: Path) -> None:
    """What the golden tests read."""
    import json

    folder = loud_model(tmp_path / "m", {"num_hidden_layers": 1, **VARIANTS["llama, rope yarn"]})
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "rope_parameters" in document
    assert "rope_scaling" not in document
    assert load_spec(folder) == parse_spec(older(document, "rope_type"))
