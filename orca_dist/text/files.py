"""The JSON files of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orca_dist.errors import ModelError


def special_token(entry: Any) -> str | None:
    """A token of tokenizer_config.json: its text, or a mapping that holds it."""
    if isinstance(entry, dict):
        return entry.get("content")
    return entry if isinstance(entry, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file doesn't exist."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} is not a JSON object")
    return document
