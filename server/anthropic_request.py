"""From a request of Anthropic's Messages API to a chat request. Pure.

Texts, thoughts, tool calls and tool results of earlier turns are translated, and so are tools and limits on thoughts.
"""

from __future__ import annotations

import re
from typing import Any

from pyllama.server.errors import InvalidRequest, ServerFault
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import INT_MAX, out_of_range, read_flag, wrong_type

DEFAULT_MAX_TOKENS = 4096
DEFAULT_BUDGET = 10_000  # tokens of thoughts, where they are asked for without a number
PASSED_ON = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")

# A choice among tools -> the same in a chat request; others change nothing.
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

# A client's billing line has a field that changes with every request; a constant instead keeps the prefix reusable.
BILLING_HEADER = "x-anthropic-billing-header:"
_BILLING_FIELD = re.compile(r"\bcch=[^;\s]*")


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Raises `InvalidRequest`, or `ServerFault` where llama-server answers 500."""
    messages = body.get("messages")
    if messages is None:
        raise ServerFault("'messages' is required")
    if not isinstance(messages, list):
        raise InvalidRequest("Expected 'messages' to be an array")
    chat_messages: list[dict[str, Any]] = []
    if body.get("system") is not None:
        chat_messages.append({"role": "system", "content": _system_text(body["system"])})
    for index, message in enumerate(messages):
        chat_messages += _read_message(message, index)
    result: dict[str, Any] = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    result["messages"] = chat_messages
    result |= _tools(body) | _thinking(body) | _output(body)
    max_tokens = body.get("max_tokens")
    result["max_tokens"] = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    stop = body.get("stop_sequences")
    if stop is not None:
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise InvalidRequest("Field 'stop_sequences': must be an array of strings")
        result["stop"] = stop
    return result


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat request that say which tools there are and whether they must be used."""
    tools = body.get("tools")
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise wrong_type("tools", "array", tools)
    fields: dict[str, Any] = {"tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]}
    choice = body.get("tool_choice")
    if choice is not None:
        if not isinstance(choice, dict):
            raise wrong_type("tool_choice", "object", choice)
        kind = choice.get("type")
        if isinstance(kind, str) and kind in TOOL_CHOICES:
            fields["tool_choice"] = TOOL_CHOICES[kind]
        elif kind == "tool":
            name = _string(choice, "name", "tool_choice")
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        if read_flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use", False):
            fields["parallel_tool_calls"] = False
    return fields


def _output(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat request that say which form the answer has and how hard to think about it."""
    config = body.get("output_config")
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise wrong_type("output_config", "object", config)
    fields: dict[str, Any] = {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = _string(config, "effort", "output_config")
    form = config.get("format")
    if form is not None:
        if not isinstance(form, dict):
            raise wrong_type("output_config.format", "object", form)
        if form.get("type") != "json_schema":
            raise InvalidRequest(
                f"Field 'output_config.format': the type is 'json_schema', not {_shown(form.get('type'))}"
            )
        if not isinstance(form.get("schema"), dict):
            raise wrong_type("output_config.format.schema", "object", form.get("schema"))
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return fields


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(where, "object", tool)
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(f"Field '{where}.type': only the client's own tools are known, not {_shown(tool['type'])}")
    function = {"name": _string(tool, "name", where), "parameters": tool.get("input_schema") or {}}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", where)
    return {"type": "function", "function": function}


def _thinking(body: dict[str, Any]) -> dict[str, Any]:
    """The limit on thoughts as a field of a chat request; types other than `enabled` change nothing."""
    thinking = body.get("thinking")
    if thinking is None:
        return {}
    if not isinstance(thinking, dict):
        raise wrong_type("thinking", "object", thinking)
    if thinking.get("type") != "enabled":
        return {}
    budget = thinking.get("budget_tokens", DEFAULT_BUDGET)
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise wrong_type("thinking.budget_tokens", "integer", budget)
    if not 0 <= budget <= INT_MAX:
        raise out_of_range("thinking.budget_tokens", 0, INT_MAX, budget)
    return {"thinking_budget_tokens": budget}


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return _without_billing_field(system)
    if not isinstance(system, list):
        raise wrong_type("system", "string or array", system)
    return "".join(_without_billing_field(_text_of(block, f"system[{index}]")) for index, block in enumerate(system))


def _without_billing_field(text: str) -> str:
    return _BILLING_FIELD.sub("cch=0", text) if text.startswith(BILLING_HEADER) else text


def _text_of(block: Any, where: str) -> str:
    """The text of a block that may only be a text."""
    if not isinstance(block, dict):
        raise wrong_type(where, "object", block)
    kind = block.get("type")
    if kind == "image":
        raise _no_images()
    if kind != "text":
        raise InvalidRequest(f"Field '{where}': only text blocks are known here, but the type is {_shown(kind)}")
    return _string(block, "text", where)


def _shown(kind: Any) -> str:
    return f"'{kind}'" if isinstance(kind, str) else type_name(kind)


def _no_images() -> ServerFault:
    return ServerFault("image input is not supported - hint: if this is unexpected, you may need to provide the mmproj")


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", "string", value)
    return value


def _read_message(message: Any, index: int) -> list[dict[str, Any]]:
    """One turn as chat messages: the turn itself, then one message per tool result in it."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise wrong_type(where, "object", message)
    role = _string(message, "role", where)
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"Field '{where}.role': must be 'user' or 'assistant', but is '{role}'")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong_type(f"{where}.content", "string or array", content)

    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for position, block in enumerate(content):
        place = f"{where}.content[{position}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(_string(block, "thinking", place))
        elif kind == "redacted_thinking":
            continue  # nobody but its author can read it
        elif kind == "tool_use":
            calls.append(_tool_call(block, place))
        elif kind == "tool_result":
            results.append(_tool_result(block, place))
        else:
            parts.append({"type": "text", "text": _text_of(block, place)})

    turn: dict[str, Any] = {"role": role}
    if parts or not (calls or results):
        turn["content"] = parts
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return ([turn] if len(turn) > 1 else []) + results


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise wrong_type(f"{where}.input", "object", arguments)
    function = {"name": _string(block, "name", where), "arguments": arguments or {}}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    else:
        raise wrong_type(f"{where}.content", "string or array", content)
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}
