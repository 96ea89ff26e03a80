"""JSON schemas as `llguidance` takes them: what users of llama-server expect, made explicit before the conversion.

A keyword that restricts and cannot be honoured is refused there by name. Keywords that only describe go through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pyllama.errors import InvalidArgument

MAX_DEPTH = 100
MAX_LENGTH = 500_000  # characters of a schema
MAX_PARTS = 2000  # schemas within a schema
MAX_PATTERNS = 10_000  # characters of all patterns together
SCHEMA_ERROR = "JSON schema conversion failed:\n"

KNOWN_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Others are annotations, as the standard lets them be."""

_ESCAPE = re.compile(r"\\.", re.DOTALL)
_BLANK = r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_BLANKS = {r"\s": f"[{_BLANK}]", r"\S": f"[^{_BLANK}]"}

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_COMBINATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "unevaluatedProperties")
_VALUE_KEYWORDS = """
    type const enum $ref $dynamicRef $recursiveRef $id $anchor minimum maximum exclusiveMinimum
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
    combines = joins_arrays = has_rest = False
    n_parts = n_pattern = 0

    def look(part: Mapping[str, Any]) -> None:
        nonlocal combines, joins_arrays, has_rest, n_parts, n_pattern
        n_parts += 1
        names = part.get("patternProperties")
        n_pattern += len(str(part.get("pattern", ""))) + sum(map(len, names) if isinstance(names, Mapping) else ())
        if n_pattern > MAX_PATTERNS:
            raise InvalidArgument(f"{SCHEMA_ERROR}pattern: all patterns together pass {MAX_PATTERNS} characters")
        if n_parts > MAX_PARTS:
            raise InvalidArgument(f"{SCHEMA_ERROR}the schema holds more than {MAX_PARTS} schemas")
        has_combinator = any(name in part for name in _COMBINATORS)
        joins_arrays = joins_arrays or (has_combinator and ("items" in part or "allOf" in part))
        has_rest = has_rest or (isinstance(part.get("items"), list) and part.get("additionalItems", True) is not True)
        combines = combines or "allOf" in part or ("properties" in part and has_combinator)

    _walk(schema, look, 0)
    if joins_arrays and has_rest:
        raise InvalidArgument(f"{SCHEMA_ERROR}additionalItems: not together with several descriptions of one array")

    def change(part: dict[str, Any]) -> None:
        _modernise(part)
        if "format" in part and part["format"] not in KNOWN_FORMATS:
            del part["format"]
        if not combines and "properties" in part and not {"additionalProperties", "patternProperties"} & part.keys():
            part["additionalProperties"] = False
        _check_names(part)
        if part is not copy and "$id" in part and "$ref" in part:
            raise InvalidArgument(f"{SCHEMA_ERROR}$id beside $ref: drafts differ in what the reference is relative to")

    if "draft-03" in str(schema.get("$schema")):
        raise InvalidArgument(f"{SCHEMA_ERROR}$schema: draft 3 is not supported, draft 4 and later are")
    # Every keyword of drafts 4 to 2020-12 counts, whatever draft `$schema` names. Unknown ones are annotations;
    # llguidance's own are not for clients to set.
    copy: dict[str, Any] = _copied(schema, 0)
    _walk(copy, change, 0)
    return copy


def has_open_names(schema: Mapping[str, Any]) -> bool:
    """Whether a prepared schema has an object that names some properties and allows others.

    Other names are told apart from the named ones as they are written: they must not be spelled with `\\u` escapes.
    """
    found = False

    def look(part: Mapping[str, Any]) -> None:
        nonlocal found
        names = part.get("properties") or part.get("patternProperties")
        found = found or (bool(names) and part.get("additionalProperties") is not False)

    _walk(schema, look, 0)
    return found


def _modernise(part: dict[str, Any]) -> None:
    """What means the same in words that the library knows, in place; patterns: what ECMA-262 calls blank."""
    if not isinstance(part.get("items"), list):
        part.pop("additionalItems", None)  # it says nothing then
    elif "prefixItems" in part:
        raise InvalidArgument(f"{SCHEMA_ERROR}prefixItems beside a list in items: no draft has both")
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    if isinstance(part.get("pattern"), str):
        part["pattern"] = _with_blanks(part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        part["patternProperties"] = {_with_blanks(name): value for name, value in part["patternProperties"].items()}


def _with_blanks(pattern: str) -> str:
    return _ESCAPE.sub(lambda match: _BLANKS.get(match[0], match[0]), pattern)


def _check_names(part: Mapping[str, Any]) -> None:
    """Names that the schema does not give may come twice, so there is no telling how many different ones there are."""
    least, required = part.get("minProperties"), part.get("required")
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if isinstance(least, int) and not is_closed:
        n_certain = len(set(map(str, required))) if isinstance(required, list) else 0
        if least > n_certain + 1:
            raise InvalidArgument(
                f"{SCHEMA_ERROR}minProperties: that {least} names differ can only be kept to where they are given"
            )


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
    if len(text) > MAX_LENGTH:
        raise InvalidArgument(f"{SCHEMA_ERROR}the schema has {len(text)} characters, more than {MAX_LENGTH}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{SCHEMA_ERROR}not valid JSON: {error}") from None
