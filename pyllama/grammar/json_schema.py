"""JSON schemas as `llguidance` takes them: what users of llama-server expect, made explicit before the conversion.

A keyword that restricts and cannot be honoured is refused there by name. Keywords that only describe go through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pyllama.errors import InvalidArgument

MAX_DEPTH = 100
SCHEMA_ERROR = "JSON schema conversion failed:\n"

KNOWN_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Others are annotations, as the standard lets them be."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_COMBINATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "unevaluatedProperties")
_VALUE_KEYWORDS = """
    type const enum $ref $dynamicRef $recursiveRef $id $schema $anchor $dynamicAnchor minimum maximum exclusiveMinimum
    exclusiveMaximum multipleOf minLength maxLength pattern format minItems maxItems uniqueItems minContains maxContains
    required minProperties maxProperties dependentRequired dependentSchemas dependencies unevaluatedItems
    unevaluatedProperties
"""
_RESTRICTING = frozenset((*_VALUE_KEYWORDS.split(), *_MAPS, *_LISTS, *_SINGLE))


def prepare_schema(schema: Any) -> dict[str, Any]:
    """The schema to convert; an empty one stands for any object. Raises `InvalidArgument`.

    Objects with `properties` that say nothing of others allow no others, as with llama-server. Only where keywords
    combine several descriptions of one object does the rule of the standard stay: every description alone is open.
    """
    if not isinstance(schema, Mapping):
        raise InvalidArgument(f"{SCHEMA_ERROR}a schema must be an object, found {type(schema).__name__}")
    if not schema:
        return {"type": "object"}
    combines = False

    def look(part: Mapping[str, Any]) -> None:
        nonlocal combines
        combines = combines or "allOf" in part or ("properties" in part and any(name in part for name in _COMBINATORS))

    _walk(schema, look, 0)

    def change(part: dict[str, Any]) -> None:
        if "format" in part and part["format"] not in KNOWN_FORMATS:
            del part["format"]
        if not combines and "properties" in part and not {"additionalProperties", "patternProperties"} & part.keys():
            part["additionalProperties"] = False

    # Unknown keywords are annotations; llguidance's own are not for clients to set.
    copy: dict[str, Any] = _copied(schema, 0)
    _walk(copy, change, 0)
    return copy


def _copied(part: Any, depth: int) -> Any:
    """The schema below `part` without unknown keywords."""
    if not isinstance(part, Mapping):
        return part
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"{SCHEMA_ERROR}the schema is nested deeper than {MAX_DEPTH}")
    copy: dict[str, Any] = {}
    for name, value in part.items():
        if name in _MAPS and isinstance(value, Mapping):
            copy[name] = {key: _copied(child, depth + 1) for key, child in value.items()}
        elif name in (*_LISTS, *_SINGLE) and isinstance(value, list):
            copy[name] = [_copied(child, depth + 1) for child in value]
        elif name in _SINGLE:
            copy[name] = _copied(value, depth + 1)
        elif name in _RESTRICTING:
            copy[name] = value
    return copy


def _walk(part: Any, visit: Callable[[Any], None], depth: int) -> None:
    """`visit` every schema object in the places where the standard has schemas."""
    if not isinstance(part, Mapping):
        return
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"{SCHEMA_ERROR}the schema is nested deeper than {MAX_DEPTH}")
    visit(part)
    for name, value in list(part.items()):
        if name in _MAPS and isinstance(value, Mapping):
            for child in value.values():
                _walk(child, visit, depth + 1)
        elif name in (*_LISTS, *_SINGLE) and isinstance(value, list):
            for child in value:
                _walk(child, visit, depth + 1)
        elif name in _SINGLE:
            _walk(value, visit, depth + 1)


def parse_schema(text: str) -> Any:
    """JSON text of a schema. Raises `InvalidArgument`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{SCHEMA_ERROR}not valid JSON: {error}") from None
