"""JSON from files of unknown origin: objects and lists where they are expected, or an error that says what was."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyllama.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds {_kind(value)}, expected an object")
    return value


def as_object(value: Any, what: str) -> Mapping[str, Any]:
    """null counts as absent, and so as empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"{what} is {_kind(value)}, expected an object")
    return value


def as_list(value: Any, what: str) -> list[Any]:
    """null counts as absent, and so as empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ModelError(f"{what} is {_kind(value)}, expected a list")
    return value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )
