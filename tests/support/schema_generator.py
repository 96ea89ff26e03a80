"""Random JSON schemas of the kind that clients send, each with short texts that a model with random weights can end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

NAMES = ("a", "id", "name", "é", "two words", "x-y", "päth/1", "value", "items", "type")


class SchemaGenerator:
    """`make` gives a schema; nothing in it needs more than a few hundred characters of text."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def make(self) -> dict[str, Any]:
        self._definitions = {}
        schema: dict[str, Any] = {}
        if self._rng.random() < 0.4:
            self._definitions["leaf"] = self._leaf()
            self._definitions["node"] = self._object(1)
        while not schema or schema.keys() & {"$ref"}:
            schema = self._any(3)
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        roll = self._rng.random()
        if depth == 0 or roll < 0.25:
            schema = self._leaf()
        elif roll < 0.6:
            schema = self._object(depth - 1)
        elif roll < 0.8:
            schema = self._array(depth - 1)
        elif roll < 0.9:
            schema = {"anyOf": [self._any(depth - 1) for _ in range(self._rng.randint(1, 3))]}
        elif roll < 0.95 and self._definitions:
            schema = {"$ref": f"#/$defs/{self._rng.choice(list(self._definitions))}"}
        else:
            schema = {"allOf": [self._object(0, NAMES[:5], open_=True), self._object(0, NAMES[5:], open_=True)]}
        if self._rng.random() < 0.1:
            schema["description"] = "a note"
        return schema

    def _leaf(self) -> dict[str, Any]:
        rng = self._rng
        low = rng.randint(-50, 50)
        patterns = ("^[a-z]{2,5}$", "^(yes|no)$", "^\\d{3}-\\w{1,3}$", "^é?[^\\sa]{1,3}$")
        kinds: list[dict[str, Any]] = [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 20)},
            {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": rng.randint(2, 7)},
            {"type": "string", "minLength": (least := rng.randint(0, 4)), "maxLength": least + rng.randint(0, 6)},
            {"type": "string", "pattern": rng.choice(patterns)},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"enum": rng.sample([1, -2.5, "a", "\n\"é", None, True, [1, "b"], {"k": [None]}], rng.randint(1, 4))},
            {"const": rng.choice([0, "x y", {"a": {}}, [[]], False])},
        ]  # fmt: skip
        return rng.choice(kinds)

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._rng.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + self._rng.randint(0, 2)}
        if self._rng.random() < 0.3:
            schema["prefixItems"] = [self._any(depth) for _ in range(self._rng.randint(1, 2))]
        schema["items"] = self._any(depth)
        return schema

    def _object(self, depth: int, names_from: Sequence[str] = NAMES, *, open_: bool = False) -> dict[str, Any]:
        names = self._rng.sample(names_from, self._rng.randint(1, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        schema["required"] = self._rng.sample(names, self._rng.randint(0, len(names)))
        roll = self._rng.random()
        if open_:  # a number of properties can only be kept to where all named ones are required
            schema |= {"required": names, "maxProperties": 8}
        elif roll < 0.3:
            schema["additionalProperties"] = False
        elif roll < 0.4:
            schema |= {"additionalProperties": self._leaf(), "required": names, "maxProperties": len(names) + 1}
        return schema
