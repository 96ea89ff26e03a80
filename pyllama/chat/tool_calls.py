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
from typing import Any

from pyllama.chat.reasoning_split import partial_length
from pyllama.chat.tool_sets import (
    CALL_END,
    CALL_START,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    MISTRAL_ID,
    PYTHON_TAG,
    ParameterSchemas,
    Schema,
    ToolSet,
    ToolStyle,
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: the JSON text of an object. `id`: the model's own, where its family writes one."""

    name: str
    arguments: str
    id: str = ""


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


def json_call(text: str, schemas: Mapping[str, Schema]) -> ToolCall | None:
    """`{"name": ..., "arguments" or "parameters": {...}}`, perhaps inside `"function"`, perhaps with an `"id"`."""
    try:
        return _object_call(_load(text), schemas)
    except (ValueError, RecursionError):
        return None


def _object_call(value: Any, schemas: Mapping[str, Schema]) -> ToolCall | None:
    """Raises `ValueError`, `RecursionError`."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:  # none were written: right for a tool that needs none
        arguments = [] if schemas.get(name, {}).get("required") else {}
    if isinstance(arguments, str):  # some models write the JSON text of the object
        arguments = _load(arguments)
    if not isinstance(arguments, dict):
        return None
    call_id = value.get("id")
    return ToolCall(name, _dump(arguments), call_id if isinstance(call_id, str) else "")


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_OPENED = re.compile(r"\s*<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"\s*</parameter>(?=\s*(?:<parameter=|\Z))")
_VALUE = re.compile(r"(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def xml_call(text: str, tools: Mapping[str, Schema]) -> ToolCall | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`; the tool's schema says what a value is."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    name = function[1].strip()
    parameters = ParameterSchemas(tools.get(name, {}))
    arguments: dict[str, Any] = {}
    body = function[2].rstrip()
    position = 0
    while position < len(body):
        opened = _OPENED.match(body, position)
        if opened is None:
            return None
        key = opened[1].strip()
        read = _parameter_value(body, opened.end(), parameters.schema_of(key), parameters)
        if read is None:
            return None
        arguments[key], position = read
    try:
        return ToolCall(name, _dump(arguments)) if name else None
    except (ValueError, RecursionError):
        return None


_BLANKS = re.compile(r"\s*")


def _parameter_value(body: str, start: int, schema: Any, parameters: ParameterSchemas) -> tuple[Any, int] | None:
    """The value that begins there, without the line breaks of its tags, and the place after its end tag.

    Text where the schema says so, or where it is not JSON.
    """
    is_text = parameters.is_text(schema)
    if not is_text:  # a JSON text may hold end tags
        try:
            blanks = _BLANKS.match(body, start)
            value, end = _DECODER.raw_decode(body, blanks.end() if blanks else start)
            closing = _PARAMETER_END.match(body, end)
            if closing is not None and (isinstance(value, str) or not parameters.is_string(schema)):
                return value, closing.end()
        except (ValueError, RecursionError):
            pass
    found = _VALUE.match(body, start)
    if found is None:
        return None
    text = found[1].removeprefix("\n").removesuffix("\n")
    if not is_text and isinstance(schema, Mapping) and schema.get("type") == "boolean":
        text = {"true": True, "false": False}.get(text.strip().lower(), text)
    return text, found.end()


_IN_JSON = re.compile(r'\\.|\\\Z|["{}\[\]]', re.DOTALL)


class _JsonScan:
    """Where growing JSON text stands: inside a string, how deep in brackets. Every character is looked at once."""

    def __init__(self) -> None:
        self.in_string = False
        self._depth = 0
        self._seen = 0

    def skip_to(self, start: int) -> None:
        """Nothing before that place counts."""
        self._seen = max(self._seen, start)

    def advance(self, text: str, end: int) -> int:
        """Read on to `end`; the place after the bracket that closes the outermost one, or -1."""
        for match in _IN_JSON.finditer(text, self._seen, end):
            found = match[0]
            if found == "\\":  # what it escapes is still to come
                self._seen = match.start()
                return -1
            if found == '"':
                self.in_string = not self.in_string
            elif not self.in_string and found in "{[":
                self._depth += 1
            elif not self.in_string and found in "}]":
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
        schemas = self._tools.schemas
        return json_call(body, schemas) if body.lstrip().startswith("{") else xml_call(body, schemas)

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
        call = json_call(self._held[before:end], self._tools.schemas)
        if call is None or call.name not in self._tools.schemas:
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


class MistralCalls:
    """Calls after `[TOOL_CALLS]`: an array of objects, or a name, perhaps an id, and the arguments.

    White space before a call, between calls and after the last one is dropped.
    """

    def __init__(self, tools: ToolSet) -> None:
        self._tools = tools
        self._held = ""
        self._space = ""
        self._in_call = False
        self._after_call = False
        self._scan = _JsonScan()

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._call_step(parts) if self._in_call else self._text_step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._in_call:
            self._give_up(parts)
            parts += self.push("")
        if self._held and not (self._after_call and self._held.isspace()):
            parts.append(self._held)
        self._held = ""
        return parts

    def _text_step(self, parts: list[Part]) -> bool:
        text, marker, rest = self._held.partition(MISTRAL_CALLS)
        if not marker:
            text = text[: len(text) - partial_length(text, MISTRAL_CALLS)]
        shown = text.rstrip()
        if shown:
            parts.append(shown)
            self._after_call = False
        if not marker:
            self._held = self._held[len(shown) :]
            return False
        self._space = text[len(shown) :]
        self._held, self._in_call, self._scan = rest, True, _JsonScan()
        return True

    def _call_step(self, parts: list[Part]) -> bool:
        """True: there is more to do at once."""
        start = len(self._held) - len(self._held.lstrip())
        if start == len(self._held):
            return False
        name = call_id = ""
        if self._held[start] != "[":
            head = _MISTRAL_HEAD.match(self._held, start)
            if head is None:
                if _MISTRAL_HEAD_BEGINS.fullmatch(self._held, start):
                    return False
                self._give_up(parts)
                return True
            name, call_id, start = head[1].strip(), (head[2] or "").strip(), head.end()
        end = self._scan.advance(self._held, len(self._held)) if not name else self._arguments_end(start)
        if end < 0:
            return False
        calls = self._parse(self._held[start:end], name, call_id)
        if calls is None:
            self._give_up(parts)
            return True
        parts += calls
        self._held, self._in_call, self._after_call = self._held[end:], False, True
        return True

    def _arguments_end(self, start: int) -> int:
        """Brackets before the arguments are those of the markers."""
        self._scan.skip_to(start)
        return self._scan.advance(self._held, len(self._held))

    def _parse(self, text: str, name: str, call_id: str) -> list[ToolCall] | None:
        try:
            value = _load(text)
            if name:
                return [ToolCall(name, _dump(value), call_id)] if isinstance(value, dict) else None
            calls = [_object_call(item, self._tools.schemas) for item in value] if isinstance(value, list) else []
        except (ValueError, RecursionError):
            return None
        complete = [call for call in calls if call is not None]
        return complete if calls and len(complete) == len(calls) else None

    def _give_up(self, parts: list[Part]) -> None:
        """The marker was text; what follows it is read again."""
        parts.append(self._space + MISTRAL_CALLS)
        self._in_call = self._after_call = False


_MISTRAL_NAME = r"\s*[^\[\]{}\s][^\[\]{}\n]*"
_MISTRAL_HEAD = re.compile(
    rf"({_MISTRAL_NAME})(?:{re.escape(MISTRAL_ID)}([^\[\]{{}}\n]*))?{re.escape(MISTRAL_ARGUMENTS)}\s*(?={{)"
)


def _beginnings(text: str) -> str:
    """A pattern for every beginning of a text, the empty one and all of it too."""
    pattern = ""
    for character in reversed(text):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return pattern


_MISTRAL_HEAD_BEGINS = re.compile(
    rf"{_MISTRAL_NAME}(?:{_beginnings(MISTRAL_ID)}|{re.escape(MISTRAL_ID)}[^\[\]{{}}\n]*{_beginnings(MISTRAL_ARGUMENTS)}"
    rf"|{_beginnings(MISTRAL_ARGUMENTS)}|(?:{re.escape(MISTRAL_ID)}[^\[\]{{}}\n]*)?{re.escape(MISTRAL_ARGUMENTS)}\s*)"
)


CallReader = TaggedCalls | BareJsonCalls | MistralCalls


def call_reader(tools: ToolSet) -> CallReader:
    if tools.style.is_tagged:
        return TaggedCalls(tools)
    return BareJsonCalls(tools) if tools.style is ToolStyle.LLAMA3 else MistralCalls(tools)
