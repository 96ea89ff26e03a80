"""JSON at the edge: bodies that may hold anything in, compact text out. Every failure is an `InvalidRequest`."""

from __future__ import annotations

import json
import re
from typing import Any

from pyllama.server.errors import InvalidRequest

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def type_name(value: object) -> str:
    """The JSON name of a parsed value's type."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_json(data: bytes) -> Any:
    """Parse a UTF-8 body. NaN and Infinity literals, bad bytes, endless numbers and nesting are refused."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequest("the body is not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if _SURROGATE_ESCAPE.search(data):
        try:
            value = replace_surrogates(value)
        except RecursionError:
            raise InvalidRequest("the body is not usable JSON: nested too deeply") from None
    return value


def parse_object(data: bytes) -> dict[str, Any]:
    value = parse_json(data)
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, but is {type_name(value)}")
    return value


def replace_surrogates(value: Any) -> Any:
    """The same value with every half of a surrogate pair that stands alone replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return value


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def dump_json(value: Any) -> bytes:
    """Compact UTF-8 text in insertion order. Text that is not UTF-8 (bytes kept as surrogates) shows as U+FFFD."""
    text = _encode(value)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return replace_surrogates(text).encode("utf-8")
