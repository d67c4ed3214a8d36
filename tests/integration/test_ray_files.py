"""cluster/ray/*.yaml as `ray up` reads them: filled in and checked by Ray's own code."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from orca_dist.cli.settings import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "cluster" / "ray").glob("*.yaml"))
COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
SECONDS_FOR_BASH = 10

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_is_one_for_each_kind() -> None:
    assert [path.stem for path in FILES] == ["aws", "gcp", "on-premise"]
    assert [_read(path)["provider"]["type"] for path in FILES] == ["aws", "gcp", "local"]


@every_file
def test_ray_takes_it(path: Path) -> None:
    config = prepare_config(_read(path))
    validate_config(config)
    assert sum(kind["min_workers"] for kind in config["available_node_types"].values()) == 1


@every_file
def test_ray_refuses_what_it_does_not_know(path: Path) -> None:
    """The checks above can fail."""
    with pytest.raises(ValidationError, match="file_mount"):
        validate_config(prepare_config(_read(path) | {"file_mount": {}}))


@every_file
def test_its_commands_are_bash(path: Path) -> None:
    config = _read(path)
    for command in (each for kind in COMMANDS for each in config.get(kind, ())):
        subprocess.run(["bash", "-n", "-c", command], check=True, timeout=SECONDS_FOR_BASH)


@every_file
def test_every_node_has_the_code_and_asks_for_the_token(path: Path) -> None:
    config = _read(path)
    mounts = config["file_mounts"]
    assert mounts == {"~/orca_dist": ".", "~/.ray/auth_token": "~/.ray/auth_token"}
    assert "RAY_AUTH_MODE=token" in config["setup_commands"][-1]
    for start in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert " ray start " in config[start][-1]


@every_file
def test_every_node_fetches_the_default_model(path: Path) -> None:
    fetch = f"~/orca_dist/.venv/bin/orca-dist model fetch {DEFAULT_MODEL}"
    assert fetch in _read(path)["setup_commands"]


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
