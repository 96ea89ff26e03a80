"""From a request of OpenAI's Responses API to a chat request. Pure.

Nothing is stored on the server, so fields that point to something stored are refused.
"""

from __future__ import annotations

import logging
from typing import Any

from pyllama.server.errors import InvalidRequest, NotSupported
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import read_flag, wrong_type

log = logging.getLogger("pyllama.server.srv")

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Consumed here; everything else is passed on to the chat layer.
CONSUMED = frozenset(
    {"input", "instructions", "previous_response_id", "conversation", "prompt", "background", "tools", "include"}
    | {"max_output_tokens", "reasoning", "text", "top_logprobs", "messages"}
)
LOGPROBS = "message.output_text.logprobs"  # of `include`


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Raises `InvalidRequest` or `NotSupported`."""
    _refuse_stored(body)
    _refuse_misfits(body)
    result = {name: value for name, value in body.items() if name not in CONSUMED}
    result["messages"] = _read_input(body)
    top = body.get("top_logprobs")
    if top is not None or LOGPROBS in (body.get("include") or ()):
        result["logprobs"] = True
        result["top_logprobs"] = 0 if top is None else top
    if body.get("max_output_tokens") is not None:
        result["max_tokens"] = body["max_output_tokens"]
        result.pop("max_completion_tokens", None)
    if body.get("tools") is not None:
        result["tools"] = _functions(body["tools"])
    if (answer_format := _answer_format(body.get("text"))) is not None:
        result["response_format"] = answer_format
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        result["tool_choice"] = _function_choice(choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_function_choice(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        result["tool_choice"] = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": named},
        }
    reasoning = body.get("reasoning")
    if reasoning is not None:
        if not isinstance(reasoning, dict):
            raise wrong_type("reasoning", "object", reasoning)
        if reasoning.get("effort") is not None:
            result["reasoning_effort"] = reasoning["effort"]
    return result


def _function_choice(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.get("name")}}


def _answer_format(text: Any) -> dict[str, Any] | None:
    """`text.format` as a chat request's `response_format`; None where the answer is free."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise wrong_type("text", "object", text)
    form = text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise wrong_type("text.format", "object", form)
    kind = form.get("type", "text")
    if kind == "json_schema":
        if not isinstance(form.get("schema"), dict):
            raise wrong_type("text.format.schema", "object", form.get("schema"))
        return {"type": kind, "json_schema": {"schema": form["schema"]}}
    if kind == "json_object":
        return {"type": kind}
    if kind != "text":
        raise InvalidRequest(f"Field 'text.format': the type {kind!r} is none of 'text', 'json_object', 'json_schema'")
    return None


def _refuse_stored(body: dict[str, Any]) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name):
            raise InvalidRequest(f"Field '{name}': this server stores no responses; send the whole input")
    if read_flag(body.get("background"), "background", False):
        raise NotSupported("Field 'background': this server stores no responses, so nothing could be fetched later")


def _refuse_misfits(body: dict[str, Any]) -> None:
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise wrong_type("include", "array", include)
    for name in ("n", "n_cmpl"):
        if body.get(name) not in (None, 1):
            raise InvalidRequest(f"Field '{name}': a response has one choice only")


def _functions(tools: Any) -> list[dict[str, Any]]:
    """The functions among the tools, as a chat request has them."""
    if not isinstance(tools, list):
        raise wrong_type("tools", "array", tools)
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise wrong_type(f"tools[{index}]", "object", tool)
        if tool.get("type") != "function":
            log.warning("a tool of type %s is left out: only functions exist here", tool.get("type"))
            continue
        function = {"name": _string(tool, "name", f"tools[{index}]"), "parameters": tool.get("parameters") or {}}
        if tool.get("description") is not None:
            function["description"] = _string(tool, "description", f"tools[{index}]")
        functions.append({"type": "function", "function": function})
    return functions


def _read_input(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise wrong_type("instructions", "string", instructions)
        messages.append({"role": "system", "content": instructions})
    value = body.get("input")
    if value is None:
        raise InvalidRequest("'input' is required")
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong_type("input", "string or array", value)
    thoughts = ""
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong_type(where, "object", item)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "reasoning":
            thoughts += _thoughts(item, where)
            continue
        if kind == "message":
            message = _message(item, where)
        elif kind == "function_call":
            message = {"role": "assistant", "tool_calls": [_tool_call(item, where)]}
            if messages and messages[-1]["role"] == "assistant":
                previous = messages.pop()
                message = {**previous, "tool_calls": previous.get("tool_calls", []) + message["tool_calls"]}
        elif kind == "function_call_output":
            message = {
                "role": "tool",
                "tool_call_id": _string(item, "call_id", where),
                "content": _content(item.get("output"), f"{where}.output"),
            }
        else:
            raise InvalidRequest(f"Cannot determine type of 'item': {where}")
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"] = message.get("reasoning_content", "") + thoughts
        thoughts = ""
        messages.append(message)
    return messages


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", "string", value)
    return value


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "system", "developer", "assistant"):
        raise InvalidRequest(f"Cannot determine type of 'item': {where} has no known role")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, "string or array", content)
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        place = f"{where}[{position}]"
        if not isinstance(part, dict):
            raise wrong_type(place, "object", part)
        kind = part.get("type")
        if kind == "input_image":
            # The chat layer says what is the matter with images.
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        elif isinstance(kind, str) and kind in TEXT_PARTS:
            parts.append({"type": "text", "text": _string(part, TEXT_PARTS[kind], place)})
        else:
            shown = f"'{kind}'" if isinstance(kind, str) else type_name(kind)
            raise InvalidRequest(f"Field '{place}': the type {shown} is not supported")
    return parts


def _thoughts(item: dict[str, Any], where: str) -> str:
    """The text of a reasoning item; a summary and encrypted content are not what the model wrote."""
    content = item.get("content")
    if content is None:
        return ""
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "array", content)
    for position, part in enumerate(content):
        if not isinstance(part, dict):
            raise wrong_type(f"{where}.content[{position}]", "object", part)
    return "".join(_string(part, "text", f"{where}.content[{i}]") for i, part in enumerate(content))


def _tool_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}
