"""The doctor's page names every check, and messages that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from orca_dist.doctor.verdicts import Check

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "doctor.md").read_text()
CODE = re.compile(r"`([^`]+)`")
FOREIGN = {"InvalidAuthToken", "unhandled system error", "Too many open files"}  # Ray's, NCCL's


def first_cells(title: str) -> list[str]:
    section = PAGE.partition(f"## {title}")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [row.split("|")[1] for row in rows[2:]]


def test_every_check_has_a_row_and_no_other() -> None:
    named = [CODE.findall(cell)[0] for cell in first_cells("Checks")]
    assert named == [str(check) for check in Check]


def test_symptoms_name_checks_that_exist() -> None:
    section = PAGE.partition("## Symptoms")[2]
    cells = [row.split("|")[2] for row in section.splitlines() if row.startswith("|")][2:]
    assert {name for cell in cells for name in CODE.findall(cell)} <= set(Check)


def test_messages_are_the_codes_own() -> None:
    folders = (ROOT / "orca_dist", ROOT / "kernels")
    source = "".join(path.read_text() for each in folders for path in each.rglob("*.py"))
    quoted = {code for cell in first_cells("Symptoms") for code in CODE.findall(cell)} - FOREIGN
    assert len(quoted) > 7
    for message in quoted:
        parts = [part.strip(" []s") for part in message.split("...")]
        missing = [part for part in parts if part and part not in source]
        assert not missing, (message, missing)
