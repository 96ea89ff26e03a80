"""The tools of a chat request: their validation, and how they are shown to templates that know no tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyllama.server.errors import InvalidRequest, NotSupported, ServerFault
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import read_flag, wrong_type
from pyllama.server.tool_calls import CALL_END, CALL_START


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that the model may call; none with `tool_choice` none.

    Raises `InvalidRequest`, `NotSupported` for a choice that would have to be forced, `ServerFault` where llama-server
    answers 500.
    """
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise wrong_type("tools", "array", tools)
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise ServerFault("Failed to parse tools: every tool must have the type 'function' and a 'function'")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ServerFault("Failed to parse tools: a function has no name")
        if not isinstance(function.get("parameters", {}), dict):
            raise ServerFault("Failed to parse tools: 'parameters' must be an object")
    read_flag(body.get("parallel_tool_calls"), "parallel_tool_calls", True)
    choice = body.get("tool_choice")
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise InvalidRequest(f"Invalid tool_choice: {choice}")
    if not tools or choice == "none":
        return []
    if choice is not None and choice != "auto":
        _refuse_forced(choice, tools)
    if body.get("grammar"):
        raise InvalidRequest("Cannot use custom grammar constraints with tools.")
    return tools


def _refuse_forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in {tool["function"]["name"] for tool in tools}:
            raise InvalidRequest("Field 'tool_choice': names none of the tools")
    elif choice != "required":
        raise InvalidRequest(f"Field 'tool_choice': type must be string or object, but is {type_name(choice)}")
    raise NotSupported("Field 'tool_choice': forcing a call is not supported yet; only 'auto' and 'none' are")


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name of a tool -> schemas of its parameters."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        properties = tool["function"].get("parameters", {}).get("properties")
        found[tool["function"]["name"]] = properties if isinstance(properties, dict) else {}
    return found


def with_tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, system_role: bool
) -> list[dict[str, Any]]:
    """The tools described in the system message, for a template that has no place for them.

    Without a system role, in the first message of the user.
    """
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You can call functions. These are available, one JSON object per line:\n<tools>\n{shown}\n</tools>\n"
        f"To call one, answer with its name and its arguments, as in\n"
        f'{CALL_START}\n{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}\n{CALL_END}\n'
        "Write one such block for each call. The results come back between <tool_response> and </tool_response>."
    )
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{_text(first.get('content'))}\n\n{text}"}, *messages[1:]]
    if not system_role and messages and messages[0]["role"] == "user":
        return [{**messages[0], "content": f"{text}\n\n{_text(messages[0]['content'])}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and results of earlier turns as text, for a template that would drop or refuse them.

    Results that follow each other are one message of the user, as roles have to take turns.
    """
    shown: list[dict[str, Any]] = []
    previous = None
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if previous == "tool":
                shown[-1]["content"] += f"\n{result}"
            else:
                shown.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            blocks = [_text(message["content"])] if message.get("content") else []
            blocks += [_call_text(call["function"]) for call in message["tool_calls"]]
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            shown.append({**rest, "content": "\n".join(blocks)})
        else:
            shown.append(message)
        previous = message["role"]
    return shown


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{CALL_START}\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n{CALL_END}'


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
