"""Finds tool calls in the text of an answer, piece by piece. Pure.

A call is given out when it is complete and well formed; what only looked like one is text. So nothing that was given
out is ever revised, and the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pyllama.chat.reasoning_split import partial_length

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolStyle(Enum):
    """How a family writes calls."""

    TAGGED = auto()  # <tool_call>, then {"name", "arguments"} or <function=...><parameter=...>, </tool_call>
    BARE_JSON = auto()  # the answer begins with {"name", "parameters"}, perhaps after <|python_tag|>


def style_of_template(source: str) -> ToolStyle | None:
    if CALL_START in source:
        return ToolStyle.TAGGED
    return ToolStyle.BARE_JSON if PYTHON_TAG in source or "ipython" in source.lower() else None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request: name -> its parameters' schemas by name. parallel: an answer may hold several calls."""

    style: ToolStyle
    parameters: Mapping[str, Mapping[str, Any]]
    parallel: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        return (CALL_START, CALL_END) if self.style is ToolStyle.TAGGED else (PYTHON_TAG,)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of double precision")
    return value


def _load(text: str) -> Any:
    """Strict JSON. Raises `ValueError`."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # Half a surrogate pair has no UTF-8; its escape is still JSON.
    return text if text.isprintable() or not any("\ud800" <= c <= "\udfff" for c in text) else json.dumps(value)


def json_call(text: str) -> ToolCall | None:
    """`{"name": ..., "arguments" or "parameters": {...}}`, perhaps inside `"function"`."""
    try:
        value = _load(text)
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict):
            return None
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the JSON text of the object
            arguments = _load(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return ToolCall(name, _dump(arguments))
    except (ValueError, RecursionError):
        return None


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


def xml_call(text: str, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`; the tool's schema says what a value is."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    name = function[1].strip()
    schemas = tools.get(name, {})
    arguments: dict[str, Any] = {}
    body = function[2].rstrip()
    position = 0
    while position < len(body):
        parameter = _PARAMETER.match(body, position)
        if parameter is None:
            return None
        key = parameter[1].strip()
        arguments[key] = _xml_value(parameter[2], schemas.get(key))
        position = parameter.end()
    try:
        return ToolCall(name, _dump(arguments)) if name else None
    except (ValueError, RecursionError):
        return None


def _xml_value(text: str, schema: Any) -> Any:
    """The value without the line breaks of its tags; text where the schema says so, or where it is not JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return _load(text.strip().lower() if kind == "boolean" else text)
    except ValueError:
        return text


_IN_JSON = re.compile(r'\\.|\\\Z|["{}]', re.DOTALL)


class _JsonScan:
    """Where growing JSON text stands: inside a string, how deep in objects. Every character is looked at once."""

    def __init__(self) -> None:
        self.in_string = False
        self._depth = 0
        self._seen = 0

    def advance(self, text: str, end: int) -> int:
        """Read on to `end`; the place after the `}` that closes the outermost object, or -1."""
        for match in _IN_JSON.finditer(text, self._seen, end):
            found = match[0]
            if found == "\\":  # what it escapes is still to come
                self._seen = match.start()
                return -1
            if found == '"':
                self.in_string = not self.in_string
            elif not self.in_string and found == "{":
                self._depth += 1
            elif not self.in_string and found == "}":
                self._depth -= 1
                if self._depth == 0:
                    self._seen = match.end()
                    return match.end()
        self._seen = max(self._seen, end)
        return -1


Part = str | ToolCall


class TaggedCalls:
    """Calls between `<tool_call>` and `</tool_call>`, anywhere in the text.

    White space before a call, between calls and after the last one is dropped.
    """

    def __init__(self, tools: ToolSet) -> None:
        self._tools = tools
        self._held = ""
        self._space = ""  # white space before the call that is being read
        self._in_call = False
        self._after_call = False  # nothing but white space since the last call
        self._scan = _JsonScan()
        self._look_from = 0

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._call_step(parts) if self._in_call else self._text_step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._in_call:  # models do forget the end tag of the last call
            call = self._parse(self._held)
            if call is not None:
                self._give(call, "", parts)
            else:
                self._give_up(parts)
            parts += self.push("")
        if self._held and not (self._after_call and self._held.isspace()):
            parts.append(self._held)
        self._held = ""
        return parts

    def _text_step(self, parts: list[Part]) -> bool:
        """True: there is more to do at once."""
        text, marker, rest = self._held.partition(CALL_START)
        if not marker:
            text = text[: len(text) - partial_length(text, CALL_START)]
        shown = text.rstrip()
        if shown:
            parts.append(shown)
            self._after_call = False
        if not marker:
            self._held = self._held[len(shown) :]
            return False
        self._space = text[len(shown) :]
        self._held, self._in_call = rest, True
        self._scan, self._look_from = _JsonScan(), 0
        return True

    def _call_step(self, parts: list[Part]) -> bool:
        body = self._held[:64].lstrip()
        if not body.startswith(("{", "<function=")) and not "<function=".startswith(body):
            self._give_up(parts)
            return True
        end = self._held.find(CALL_END, self._look_from)
        if end < 0:
            self._look_from = max(self._look_from, len(self._held) - len(CALL_END) + 1)
            return False
        if self._is_inside_value(end, is_json=body.startswith("{")):
            self._look_from = end + 1
            return True
        call = self._parse(self._held[:end])
        if call is None:
            self._give_up(parts)
        else:
            self._give(call, self._held[end + len(CALL_END) :], parts)
        return True

    def _is_inside_value(self, end: int, *, is_json: bool) -> bool:
        """The end tag at `end` is part of an argument."""
        if is_json:
            self._scan.advance(self._held, end)
            return self._scan.in_string
        return self._held.rfind("<parameter=", 0, end) > self._held.rfind("</parameter>", 0, end)

    def _parse(self, body: str) -> ToolCall | None:
        return json_call(body) if body.lstrip().startswith("{") else xml_call(body, self._tools.parameters)

    def _give(self, call: ToolCall, rest: str, parts: list[Part]) -> None:
        parts.append(call)
        self._held, self._in_call, self._after_call = rest, False, True

    def _give_up(self, parts: list[Part]) -> None:
        """The start tag was text; what follows it is read again."""
        parts.append(self._space + CALL_START)
        self._in_call = self._after_call = False


class BareJsonCalls:
    """Calls as JSON objects that the answer begins with, of tools that the request knows."""

    def __init__(self, tools: ToolSet) -> None:
        self._tools = tools
        self._held = ""
        self._is_text = False
        self._has_call = False
        self._scan = _JsonScan()

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while not self._is_text and self._step(parts):
            pass
        if self._is_text and self._held:
            parts.append(self._held)
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        rest, self._held = self._held, ""
        return [] if not rest or (self._has_call and not rest.strip("; \t\r\n")) else [rest]

    def _step(self, parts: list[Part]) -> bool:
        """True: an object was read and another may follow."""
        before = self._before_object()
        if before < 0:
            return False
        end = self._scan.advance(self._held, len(self._held))
        if end < 0:
            return False
        call = json_call(self._held[before:end])
        if call is None or call.name not in self._tools.parameters:
            self._is_text = True
            return False
        parts.append(call)
        self._held, self._has_call, self._scan = self._held[end:], True, _JsonScan()
        return True

    def _before_object(self) -> int:
        """Where the object begins; -1 while that is open, or when it turned out that there is none."""
        text = self._held.lstrip("; \t\r\n" if self._has_call else None)
        if text.startswith(PYTHON_TAG):
            text = text[len(PYTHON_TAG) :].lstrip()
        elif PYTHON_TAG.startswith(text):
            return -1
        key = text[1:40].lstrip()
        could_be = any(key.startswith(known) or known.startswith(key) for known in ('"name"', '"type"', '"function"'))
        if text and not (text.startswith("{") and could_be):
            self._is_text = True
            return -1
        return len(self._held) - len(text) if text else -1


def call_reader(tools: ToolSet) -> TaggedCalls | BareJsonCalls:
    return TaggedCalls(tools) if tools.style is ToolStyle.TAGGED else BareJsonCalls(tools)
