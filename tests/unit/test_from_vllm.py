"""The page for people who come from vLLM: every flag that it names here is parsed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from orca_dist.cli.knobs import VLLMS, knobs
from orca_dist.cli.main import commands
from orca_dist.cli.settings import Settings
from orca_dist.cli.usage import parse
from orca_dist.config import EngineConfig, ServerConfig
from orca_dist.errors import ConfigError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md").read_text()
CODE = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"--([a-z-]+)")
NOT_ALIKE = {"api_key", "scheduling_policy"}  # there is more to say than another name


def rows() -> list[tuple[str, str, str]]:
    """Of the first table, without its head."""
    lines = PAGE[: PAGE.index("In Python")].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [(theirs, ours, notes) for theirs, ours, notes in cells[2:]]


def words() -> list[str]:
    """Code of ours: the middle column's, the notes' and what follows the table."""
    cells = [cell for _, *ours in rows() for cell in ours]
    after = PAGE[PAGE.index("Not there:") : PAGE.index("In Python")]
    return [code for text in (*cells, after) for code in CODE.findall(text)]


def flags() -> list[str]:
    """Flags with values, as one writes them behind serve."""
    return [code for code in words() if code.startswith("--") and " " in code]


@pytest.mark.parametrize("line", flags())
def test_a_flag_exists_and_takes_its_value(line: str) -> None:
    command = parse(commands(Settings()), ["serve", "MODEL", *shlex.split(line)])
    changed = (command.engine, command.server) != (EngineConfig(), ServerConfig())
    defaults = ("2048", "16", "launcher ray", "parallel", "ageing", "cuda-graphs")
    default = any(word in line for word in defaults)
    assert changed or default or command.config is not None


def renamed() -> dict[str, str]:
    """Settings of the first column by ours of the second."""
    pairs = [
        pair
        for theirs, ours, _ in rows()
        for pair in zip(names_in(theirs), names_in(ours), strict=False)
    ]
    return {theirs: ours for theirs, ours in pairs if theirs != ours and theirs not in NOT_ALIKE}


def names_in(cell: str) -> list[str]:
    return [flag.replace("-", "_") for flag in FLAG.findall(cell)]


def test_errors_and_the_page_agree_on_what_is_named_otherwise() -> None:
    assert renamed() == VLLMS
    ours = {knob.name for kind in (EngineConfig, ServerConfig) for knob in knobs(kind)}
    assert set(VLLMS.values()) <= ours
    assert not set(VLLMS) & ours


@pytest.mark.parametrize("line", ["--pipeline-parallel-size 4", "--pipeline-parallel-size=4"])
def test_a_flag_of_theirs_is_answered_with_ours(line: str) -> None:
    with pytest.raises(ConfigError, match=r"^--pipeline-parallel-size: .* that is --stages here"):
        parse(commands(Settings()), ["serve", "MODEL", *line.split()])


def test_flags_without_a_value_are_settings() -> None:
    named = {code for code in words() if re.fullmatch(r"--[a-z-]+", code)}
    known = {*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__}
    rays = {"node_ip_address"}
    assert {flag[2:].replace("-", "_") for flag in named} <= known | rays


def test_commands_exist() -> None:
    """`orca-dist serve` and `orca-dist bench serve` among them."""
    named = {code.split()[1] for code in CODE.findall(PAGE) if code.startswith("orca-dist ")}
    assert {"serve", "bench", "simulate"} <= named
    assert named <= set(commands(Settings()))


def test_there_are_rows() -> None:
    assert len(rows()) > 20
    assert len(flags()) > 20
