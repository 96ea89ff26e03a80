"""The tools of a request and the ways in which families of models write calls of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

Schema = Mapping[str, Any]
NO_PARAMETERS: Schema = {"type": "object", "properties": {}}


class ToolStyle(Enum):
    """How a family writes calls."""

    HERMES = auto()  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    HERMES_ARGUMENTS_FIRST = auto()  # the same with the name at the end
    QWEN_XML = auto()  # <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    LLAMA3 = auto()  # the answer begins with {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>
    MISTRAL = auto()  # [TOOL_CALLS][{"name": ..., "arguments": {...}}]
    MISTRAL_ARGS = auto()  # [TOOL_CALLS]NAME[ARGS]{...}
    MISTRAL_ID_ARGS = auto()  # [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}

    @property
    def is_tagged(self) -> bool:
        return self in (ToolStyle.HERMES, ToolStyle.HERMES_ARGUMENTS_FIRST, ToolStyle.QWEN_XML)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be control tokens."""
        if self.is_tagged:
            return (CALL_START, CALL_END)
        if self is ToolStyle.LLAMA3:
            return (PYTHON_TAG,)
        return (MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGUMENTS)


_ARGUMENTS_FIRST = re.compile(r"<tool_call>(?:\\n|\s)*\{+\s*\\?[\"']arguments\\?[\"']")


def style_of_template(source: str) -> ToolStyle | None:
    if CALL_START in source:
        if "<function=" in source:
            return ToolStyle.QWEN_XML
        return ToolStyle.HERMES_ARGUMENTS_FIRST if _ARGUMENTS_FIRST.search(source) else ToolStyle.HERMES
    if MISTRAL_CALLS in source:
        if MISTRAL_ARGUMENTS not in source:
            return ToolStyle.MISTRAL
        return ToolStyle.MISTRAL_ID_ARGS if MISTRAL_ID in source else ToolStyle.MISTRAL_ARGS
    return ToolStyle.LLAMA3 if PYTHON_TAG in source or "ipython" in source.lower() else None


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools that an answer may call: name -> the schema of its arguments.

    parallel: an answer may hold several calls. is_required: it must hold one.
    """

    style: ToolStyle
    schemas: Mapping[str, Schema]
    parallel: bool = True
    is_required: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.style.markers


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """Name of a tool -> the schema of its arguments; a tool that describes none has none."""
    found: dict[str, Schema] = {}
    for tool in tools:
        schema = tool["function"].get("parameters")
        found[tool["function"]["name"]] = NO_PARAMETERS if schema is None else schema
    return found


# Keywords that raw text can be held to; and those that say nothing about a value.
_TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "$comment", "nullable"}
)


class ParameterSchemas:
    """The parameters of one tool as the XML style needs them: every value is written by itself."""

    def __init__(self, schema: Schema) -> None:
        self.root: Schema = _resolved(schema, schema)
        properties = self.root.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        others = self.root.get("additionalProperties", "properties" not in self.root)
        self.others: Any = {} if others is True else others
        """Schema of parameters that have none of their own; False: there are none."""

    def schema_of(self, key: str) -> Any:
        return self.properties.get(key, self.others)

    def is_text(self, schema: Any) -> bool:
        """Values are strings that stand there as they are; all others are JSON."""
        schema = _resolved(schema, self.root)
        if not isinstance(schema, Mapping) or not schema.keys() <= _TEXT_KEYWORDS | _ANNOTATIONS:
            return False
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            return False
        return schema.get("type") == "string" or ("type" not in schema and bool(values))

    def is_string(self, schema: Any) -> bool:
        schema = _resolved(schema, self.root)
        return self.is_text(schema) or (isinstance(schema, Mapping) and schema.get("type") == "string")

    def with_definitions(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's schema that stands by itself."""
        shared = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return {**shared, **schema}

    def resolved(self, schema: Any) -> Any:
        return _resolved(schema, self.root)


def _resolved(schema: Any, root: Schema) -> Any:
    """What a schema that is only a reference into `$defs` or `definitions` refers to; any other as it is."""
    for _ in range(20):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not schema.keys() <= {"$ref", "$defs", "definitions"} | _ANNOTATIONS:
            return schema
        match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference)
        holder = root.get(match[1]) if match else None
        target = holder.get(match[2]) if match and isinstance(holder, Mapping) else None
        if not isinstance(target, Mapping):
            return schema
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root} if schema is root else {}
        schema = {**shared, **target}
    return schema
