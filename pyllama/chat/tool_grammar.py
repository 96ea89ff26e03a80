"""The grammar of tool calls: the family's way of writing them around arguments that keep to their schemas. Pure.

Written in the notation of llguidance, whose JSON rules do the work. White space is held short, so that an answer does
not spend its tokens on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pyllama.chat.tool_sets import (
    CALL_END,
    CALL_START,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    MISTRAL_ID,
    ParameterSchemas,
    Schema,
    ToolSet,
    ToolStyle,
)
from pyllama.errors import InvalidArgument
from pyllama.grammar import GrammarCompiler, GrammarError, GrammarSource
from pyllama.grammar.json_schema import SCHEMA_ERROR, prepare_schema
from pyllama.grammar.triggers import Trigger

Marker = Callable[[str], str]
"""A text of the family that may be a control token, as the grammar has to name it."""

_LAYOUT = {"whitespace_flexible": True, "whitespace_pattern": " "}
_BLANKS = 'GAP: /[ \\t\\r\\n]{1,4}/\nSP: " "\n'
_END_OF_VALUE = "\n</parameter>\n"
MAX_COUNTED_TEXT = 10_000  # characters; a higher limit on a raw text is none
START_OF_CALL = 4096  # characters in which a call that has no start tag must begin

# What restricts an object as a whole, which cannot be seen when its values are written one by one.
_WHOLE_OBJECT = (
    *("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "enum", "const", "$ref"),
)


def tool_grammar(tools: ToolSet, marker: Marker) -> GrammarSource:
    """Calls of these tools, from the first character of the first one on.

    Raises `GrammarError`, naming the tool, for a schema that cannot be kept to in this style.
    """
    calls, rules = [], []
    for number, (name, schema) in enumerate(tools.schemas.items()):
        try:
            call, own_rules = _WRITERS[tools.style](name, _as_object(schema), number)
        except InvalidArgument as error:
            raise _fault(name, str(error)) from None
        calls.append(call)
        rules.append(own_rules)
    frame = _frame(tools.style, marker, is_single=not tools.parallel)
    alternatives = "\n    | ".join(calls)
    return GrammarSource("lark", f"{frame}function: {alternatives}\n{''.join(rules)}{_BLANKS}")


def check_tools(tools: ToolSet, compiler: GrammarCompiler, error: GrammarError) -> None:
    """Find the tool for which the grammar of all tools cannot be compiled. Raises `GrammarError`: that, or `error`."""
    for name, schema in tools.schemas.items():
        alone = ToolSet(tools.style, {name: schema}, tools.parallel, tools.is_required)
        try:
            compiler.compile(tool_grammar(alone, compiler.marker))
        except GrammarError as own:
            reason = str(own)
            try:
                compiler.compile(GrammarSource("json_schema", json.dumps(schema)))
            except GrammarError as plain:
                reason = str(plain)
            raise (own if reason.startswith("the parameters of") else _fault(name, reason)) from None
    raise error


def _fault(name: str, reason: str) -> GrammarError:
    return GrammarError(f"the parameters of '{name}': {reason}")


def tool_triggers(tools: ToolSet) -> tuple[Trigger, ...]:
    """What starts the grammar when calls are free to come or not."""
    if tools.style.is_tagged:
        return (Trigger("word", CALL_START),)
    if tools.style is not ToolStyle.LLAMA3:
        return (Trigger("word", MISTRAL_CALLS),)
    names = "|".join(re.escape(json.dumps(name)) for name in tools.schemas)
    form = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?"name"\s*:\s*'
    return (Trigger("pattern", rf"^\s*(?:<\|python_tag\|>\s*)?({form}(?:{names}))", within=START_OF_CALL),)


def _frame(style: ToolStyle, marker: Marker, *, is_single: bool) -> str:
    if style.is_tagged:
        many = "" if is_single else " (GAP? call)*"
        return f"root: call{many}\ncall: {marker(CALL_START)} GAP? function GAP? {marker(CALL_END)}\n"
    if style is ToolStyle.LLAMA3:
        many = "" if is_single else ' (GAP? ";" GAP? function)*'
        return f"root: function{many}\n"
    if style is ToolStyle.MISTRAL:
        many = "" if is_single else ' ("," GAP? function)*'
        return f'root: {marker(MISTRAL_CALLS)} GAP? "[" GAP? function{many} GAP? "]"\n'
    many = "" if is_single else " call*"
    call_id = f"{marker(MISTRAL_ID)} /[a-zA-Z0-9]{{9}}/ " if style is ToolStyle.MISTRAL_ID_ARGS else ""
    return (
        f"root: call{many}\ncall: {marker(MISTRAL_CALLS)} function\n"
        f"arguments: {call_id}{marker(MISTRAL_ARGUMENTS)} SP?\n"
    )


def _as_object(schema: Any) -> Schema:
    if not isinstance(schema, Mapping):
        raise InvalidArgument(f"{SCHEMA_ERROR}a schema must be an object")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidArgument(f"{SCHEMA_ERROR}arguments are an object, but the type is {json.dumps(kind)}")
    return {**schema, "type": "object"}


def _json_rule(name: str, schema: Mapping[str, Any]) -> str:
    return f"{name}: %json {json.dumps({'x-guidance': _LAYOUT, **prepare_schema(schema)})}\n"


def _text(text: str) -> str:
    return json.dumps(text)


def _key(name: str) -> str:
    return f"{_text(json.dumps(name) + ':')} SP?"


def _hermes(name: str, schema: Schema, number: int) -> tuple[str, str]:
    value = f"arguments_{number}"
    named = f"{_key('name')} {_text(json.dumps(name))}"
    call = f'"{{" SP? {named} "," SP? {_key("arguments")} {value} SP? "}}"'
    return call, _json_rule(value, schema)


def _hermes_arguments_first(name: str, schema: Schema, number: int) -> tuple[str, str]:
    value = f"arguments_{number}"
    named = f"{_key('name')} {_text(json.dumps(name))}"
    call = f'"{{" SP? {_key("arguments")} {value} "," SP? {named} SP? "}}"'
    return call, _json_rule(value, schema)


def _llama3(name: str, schema: Schema, number: int) -> tuple[str, str]:
    value, call, inner = f"arguments_{number}", f"call_{number}", f"inner_{number}"
    key = f"({_key('parameters')} | {_key('arguments')})"
    rest = f'"," SP? {key} {value}'
    if not schema.get("required"):
        rest = f"({rest})?"
    kind = f'({_key("type")} {_text(json.dumps("function"))} "," SP?)?'
    rules = f'{inner}: {_key("name")} {_text(json.dumps(name))} {rest} SP? "}}"\n'
    rules += f'{call}: "{{" GAP? {kind} ({inner} | {_key("function")} "{{" GAP? {inner} SP? "}}")\n'
    return call, rules + _json_rule(value, schema)


def _mistral(name: str, schema: Schema, number: int) -> tuple[str, str]:
    value = f"arguments_{number}"
    call_id = f'("," SP? {_key("id")} /"[a-zA-Z0-9]{{9}}"/)?'
    call = f'"{{" SP? {_key("name")} {_text(json.dumps(name))} "," SP? {_key("arguments")} {value} {call_id} SP? "}}"'
    return call, _json_rule(value, schema)


def _mistral_args(name: str, schema: Schema, number: int) -> tuple[str, str]:
    if "[" in name or "{" in name:
        raise InvalidArgument("a name with a bracket cannot be told from what follows it")
    value = f"arguments_{number}"
    return f"{_text(name)} arguments {value}", _json_rule(value, schema)


def _xml(name: str, schema: Schema, number: int) -> tuple[str, str]:
    parameters = ParameterSchemas(schema)
    for keyword in _WHOLE_OBJECT:
        if keyword in parameters.root:
            raise InvalidArgument(
                f"{SCHEMA_ERROR}'{keyword}' of all arguments together cannot be kept to: this chat template has them "
                "written one by one"
            )
    required = parameters.root.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise InvalidArgument(f"{SCHEMA_ERROR}'required' must be an array of strings")
    _check_tag("name of the tool", name)
    parts, rules = [], []
    keys = [*parameters.properties, *(key for key in required if key not in parameters.properties)]
    for index, key in enumerate(keys):
        _check_tag("name of a parameter", key)
        rule = f"p_{number}_{index}"
        opened = _text(f"<parameter={key}>\n")
        rules.append(f"{rule}: {opened} {rule}_v\n{_value_rule(f'{rule}_v', parameters.schema_of(key), parameters)}")
        parts.append(rule if key in required else f"{rule}?")
    if parameters.others is not False:
        rule = f"p_{number}_others"
        others = "".join(f" & ~/{_escaped(key)}/" for key in keys)
        rules.append(f'{rule}: "<parameter=" {rule.upper()}_KEY ">\\n" {rule}_v\n')
        rules.append(f"{rule.upper()}_KEY: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/{others}\n")
        rules.append(_value_rule(f"{rule}_v", parameters.others, parameters))
        parts.append(f"{rule}*")
    call = " ".join([_text(f"<function={name}>\n"), *parts, _text("</function>")])
    return call, "".join(rules)


def _value_rule(rule: str, schema: Any, parameters: ParameterSchemas) -> str:
    """A value and the end of its parameter."""
    if schema is False:
        raise InvalidArgument(f"{SCHEMA_ERROR}a required parameter may not be there")
    if schema is True or schema == {}:
        return _text_rule(rule, "/(?s:.*)/")
    if not parameters.is_text(schema):
        if not isinstance(schema, Mapping):
            raise InvalidArgument(f"{SCHEMA_ERROR}a schema must be an object, found {type(schema).__name__}")
        own = _json_rule(f"{rule}_json", parameters.with_definitions(schema))
        return f"{rule}: {rule}_json {_text(_END_OF_VALUE)}\n{own}"
    schema = parameters.resolved(schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    least, most = (_length(schema, name) for name in ("minLength", "maxLength"))
    if values is None:
        counts = "*" if not least and most is None else f"{{{least or 0},{'' if most is None else most}}}"
        return _text_rule(rule, f"/(?s:.{counts})/")
    fitting = [v for v in values if len(v) >= (least or 0) and (most is None or len(v) <= most)]
    if not fitting:
        raise InvalidArgument(f"{SCHEMA_ERROR}no value can match")
    return _text_rule(rule, "(" + " | ".join(map(_text, fitting)) + ")")


def _text_rule(rule: str, text: str) -> str:
    """A raw text ends where the end of its parameter is met first, and does not hold the end tag."""
    terminal = rule.upper()
    kept = f"({text} & ~/(?s:.*)<\\/parameter>(?s:.*)/)"
    return f"{rule}[lazy]: {terminal}\n{terminal}: {kept} {_text(_END_OF_VALUE)}\n"


def _length(schema: Schema, name: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{SCHEMA_ERROR}'{name}' must be a number of characters, found {json.dumps(value)}")
    if value > MAX_COUNTED_TEXT:
        if name == "minLength":
            raise InvalidArgument(f"{SCHEMA_ERROR}'minLength' {value} is more than {MAX_COUNTED_TEXT}")
        return None
    return value


def _check_tag(what: str, text: str) -> None:
    if not text or any(character in text for character in "<>\r\n") or text != text.strip():
        raise InvalidArgument(f"the {what} {text!r} cannot stand in a tag of this chat template's calls")


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


_WRITERS: dict[ToolStyle, Callable[[str, Schema, int], tuple[str, str]]] = {
    ToolStyle.HERMES: _hermes,
    ToolStyle.HERMES_ARGUMENTS_FIRST: _hermes_arguments_first,
    ToolStyle.QWEN_XML: _xml,
    ToolStyle.LLAMA3: _llama3,
    ToolStyle.MISTRAL: _mistral,
    ToolStyle.MISTRAL_ARGS: _mistral_args,
    ToolStyle.MISTRAL_ID_ARGS: _mistral_args,
}
