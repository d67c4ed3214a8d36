"""docs/models.md lists what is supported and checked: no more, no less, and by the same measure."""

from __future__ import annotations

import re
from pathlib import Path

from orca_dist.spec import FAMILIES, RopeType
from orca_dist.text.older_files import MERGES_FILE, PIECES_CLASSES, PIECES_FILE, VOCABULARY_CLASSES
from orca_dist.weights.gguf_config import ARCHITECTURES
from tests.fixtures.families import OTHERS, VARIANTS
from tests.fixtures.golden_measure import (
    CHUNKED,
    MAX_TOKENS,
    MIN_AGREEMENT,
    MIN_ROUTED_AGREEMENT,
    NUM_STAGES,
    PROMPTS,
    TOLERANCE,
)
from tests.fixtures.ropes import ROPES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def table(title: str) -> dict[str, set[str]]:
    """First column -> the code spans of the last, of the table under a heading."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [line.strip("|").split("|") for line in lines[1:]]
    return {row[0].strip(" `"): set(re.findall(r"`([^`]+)`", row[-1])) for row in rows}


def test_every_family_is_listed_with_its_variants() -> None:
    checked = {**OTHERS, "llama": VARIANTS["llama"]}
    assert table("Families") == {
        family: {name for name, config in checked.items() if config["model_type"] == family}
        for family in FAMILIES
    }


def test_every_rope_type_is_listed_with_its_variants() -> None:
    wanted: dict[str, set[str]] = {rope_type.value: set() for rope_type in RopeType}
    for name, rope in ROPES.items():
        wanted[rope["rope_type"]].add("llama" if name == "default" else f"llama, rope {name}")
    assert table("Rotary embedding") == wanted


def test_both_tables_together_list_every_variant() -> None:
    listed = [*table("Families").values(), *table("Rotary embedding").values()]
    assert set().union(*listed) == set(VARIANTS)


def test_every_tokenizer_class_is_listed_with_its_files() -> None:
    classes = table("Tokenizers")
    (pieces,) = (names for files, names in classes.items() if files.startswith(PIECES_FILE))
    (vocabulary,) = (names for files, names in classes.items() if files.endswith(MERGES_FILE))
    assert pieces == set(PIECES_CLASSES)
    assert vocabulary == set(VOCABULARY_CLASSES)


def test_every_architecture_of_gguf_is_listed() -> None:
    assert list(table("GGUF")) == list(ARCHITECTURES)


def test_the_measure_is_the_tests_own() -> None:
    prose = " ".join(PAGE.split())
    first, last = ", ".join(map(str, NUM_STAGES[:-1])), NUM_STAGES[-1]
    assert f"on {first} and {last} stages" in prose
    assert f"within {TOLERANCE:.0e}".replace("e-0", "e-") in prose
    assert f"of five prompts and {MAX_TOKENS} decode steps" in prose
    assert f"with chunks of at most {CHUNKED.max_batch_tokens} tokens" in prose
    assert len(PROMPTS) == 5
    assert f"at least {MIN_AGREEMENT:.0%}".replace("%", " %") in prose
    assert f"Of models with experts it is at least {MIN_ROUTED_AGREEMENT:.0%}"[:-1] in prose
