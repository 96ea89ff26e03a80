"""Every keyword of JSON Schema, drafts 4 to 2020-12: kept to, refused by name, or a note. None is ignored silently.

The table of docs/structured-output.md is this one. Proof of a kept one: an instance that breaks it cannot be written,
one that does not can.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from python.test_grammar import COMPILER, accepts

from pyllama.grammar import Constraint, GrammarError, GrammarSource

_INTEGER = {"type": "integer"}

# keyword: (schema, texts that can be written, texts that cannot)
KEPT: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": _INTEGER}}, ["1"], ['"a"']),
    "$defs": ({"$ref": "#/$defs/b", "$defs": {"a": _INTEGER, "b": {"const": 2}}}, ["2"], ["1"]),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": _INTEGER}}, ["1"], ['"a"']),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **_INTEGER}}}, ["1"], ['"a"']),
    "$id": ({"$id": "http://x/", "$ref": "http://x/#/$defs/a", "$defs": {"a": _INTEGER}}, ["1"], ['"a"']),
    "allOf": ({"allOf": [_INTEGER, {"minimum": 3}]}, ["3"], ["2", '"a"']),
    "anyOf": ({"anyOf": [_INTEGER, {"type": "null"}]}, ["1", "null"], ["true"]),
    "oneOf": ({"oneOf": [_INTEGER, {"type": "string"}]}, ["1", '"a"'], ["true"]),
    "type": ({"type": ["integer", "null"]}, ["1", "null"], ['"a"', "1.5", "true", "[]", "{}"]),
    "enum": ({"enum": [1, "a", None, [1]]}, ["1", '"a"', "null", "[1]"], ["2", '"b"', "[2]"]),
    "const": ({"const": {"a": 1}}, ['{"a":1}'], ['{"a":2}', "1"]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, ["9", "0"], ["10"]),
    "maximum": ({"type": "number", "maximum": 5}, ["5", "-7.5"], ["5.1", "6"]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, ["4"], ["5"]),
    "exclusiveMaximum (draft 4)": ({"type": "integer", "maximum": 5, "exclusiveMaximum": True}, ["4"], ["5"]),
    "minimum": ({"type": "number", "minimum": 5}, ["5", "7.5"], ["4.9", "-6"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, ["6"], ["5"]),
    "exclusiveMinimum (draft 4)": ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, ["6"], ["5"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"ab"', '"é😀"'], ['"abc"']),
    "minLength": ({"type": "string", "minLength": 2}, ['"ab"', '"é😀"'], ['"a"', '"😀"']),
    "pattern": ({"type": "string", "pattern": "^a\\sb$"}, ['"a b"', '"a\ufeffb"'], ['"ab"', '"a b "', '"a\x85b"']),
    "format": ({"type": "string", "format": "date"}, ['"2020-01-31"'], ['"2020-13-31"', '"a"']),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
    "minItems": ({"type": "array", "minItems": 1}, ["[1]"], ["[]"]),
    "prefixItems": ({"prefixItems": [_INTEGER]}, ["[1]", "[1,true]"], ["[true]"]),
    "items": ({"type": "array", "items": _INTEGER}, ["[]", "[1]"], ["[true]"]),
    "items (a list)": ({"items": [_INTEGER]}, ["[1]", "[1,true]"], ["[true]"]),
    "additionalItems": ({"items": [_INTEGER], "additionalItems": False}, ["[1]"], ["[1,2]"]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    "minProperties": ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    "required": ({"type": "object", "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}']),
    "properties": ({"properties": {"a": _INTEGER}}, ['{"a":1}', "{}"], ['{"a":true}']),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^é": _INTEGER}},
        ['{"é1":1}', '{"b":true}'],
        ['{"é1":true}', '{"\\u00e91":true}'],
    ),
    "additionalProperties": (
        {"properties": {"a": _INTEGER}, "additionalProperties": {"type": "null"}},
        ['{"a":1,"b":null}'],
        ['{"b":1}', '{"a":null}', '{"\\u0061":null}'],
    ),
}  # fmt: skip

REFUSED: dict[str, dict[str, Any]] = {
    "$dynamicRef": {"$dynamicRef": "#x", "$defs": {"a": {"$dynamicAnchor": "x"}}},
    "$recursiveRef": {"$recursiveRef": "#"},
    "not": {"not": _INTEGER},
    "if": {"if": _INTEGER},
    "then": {"if": _INTEGER, "then": {"minimum": 3}},
    "else": {"if": _INTEGER, "else": {"minimum": 3}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "contains": {"contains": _INTEGER},
    "minContains": {"contains": _INTEGER, "minContains": 2},
    "maxContains": {"contains": _INTEGER, "maxContains": 2},
    "propertyNames": {"propertyNames": {"maxLength": 2}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"properties": {"a": {}}, "unevaluatedProperties": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    # kept to in simpler places
    "oneOf": {"oneOf": [_INTEGER, {"type": "number"}]},
    "minProperties": {"type": "object", "minProperties": 2},
    "additionalItems": {"allOf": [{"items": [_INTEGER, {}]}], "items": [_INTEGER], "additionalItems": _INTEGER},
    "$id": {"allOf": [{"$id": "http://x/y/", "$ref": "#/$defs/a"}], "$defs": {"a": _INTEGER}},
    "$schema": {"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 3},
    "pattern": {"type": "string", "pattern": "^(?=a)"},
}

NOTES: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2019-09/schema",
    "id": "http://x/y",
    "$comment": "x",
    "$vocabulary": {"http://x": True},
    "$dynamicAnchor": "x",
    "$recursiveAnchor": True,
    "title": "x",
    "description": "x",
    "default": 5,
    "examples": [5],
    "deprecated": True,
    "readOnly": True,
    "writeOnly": True,
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": _INTEGER,
    "format": "iri",
    "x-guidance": {"whitespace_flexible": False},
    "anything": 5,
}

# Of the meta-schemas of the drafts.
ALL_KEYWORDS = [
    "$schema",
    "id",
    "$id",
    "$ref",
    "$anchor",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
    "$comment",
    "$defs",
    "definitions",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "prefixItems",
    "items",
    "additionalItems",
    "contains",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "type",
    "enum",
    "const",
    "multipleOf",
    "maximum",
    "exclusiveMaximum",
    "minimum",
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
    "maxContains",
    "minContains",
    "maxProperties",
    "minProperties",
    "required",
    "dependentRequired",
    "title",
    "description",
    "default",
    "deprecated",
    "readOnly",
    "writeOnly",
    "examples",
    "format",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
]


def compiled(schema: Any) -> Constraint:
    return COMPILER.compile(GrammarSource("json_schema", json.dumps(schema)))


def test_no_keyword_is_missing_from_the_table() -> None:
    assert not set(ALL_KEYWORDS) - {name.partition(" ")[0] for name in (*KEPT, *REFUSED, *NOTES)}


@pytest.mark.parametrize("keyword", KEPT)
def test_a_kept_keyword_is_kept(keyword: str) -> None:
    schema, good, bad = KEPT[keyword]
    assert keyword.partition(" ")[0] in json.dumps(schema)
    start = compiled(schema)
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_refused_keyword_is_named(keyword: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(REFUSED[keyword])
    named = {"then": "if", "else": "if", "pattern": "look-around"}.get(keyword, keyword)
    assert named in str(caught.value)


@pytest.mark.parametrize("keyword", NOTES)
def test_a_note_changes_nothing(keyword: str) -> None:
    start = compiled({"type": "string", keyword: NOTES[keyword]})
    assert all(accepts(start, text) for text in ('""', '"!"', '"5"'))
    assert not accepts(start, "5")


def test_the_document_lists_the_same_keywords() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs/structured-output.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").partition(" | ") for line in document.splitlines()]
    listed = {fate: {word.strip("`") for word in words.split()} for fate, _, words in rows}
    names = {fate: {name.partition(" ")[0] for name in table} & set(ALL_KEYWORDS) for fate, table in
             (("kept", KEPT), ("notes", NOTES), ("refused", REFUSED))}  # fmt: skip
    assert listed["kept to"] == names["kept"]
    assert listed["refused by name"] == names["refused"] - names["kept"] - names["notes"]
    assert listed["notes"] == names["notes"] - names["kept"]
