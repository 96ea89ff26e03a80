"""Tools, calls and results of a conversation in the form that a chat template can take, as text if need be. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyllama.chat.tool_sets import CALL_END, CALL_START
from pyllama.errors import InvalidArgument


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


def with_arguments(message: dict[str, Any], *, as_object: bool) -> dict[str, Any]:
    """Arguments of tool calls as objects or as JSON texts. Raises `InvalidArgument`."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if as_object and isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments) if arguments else {}
            except ValueError:
                raise InvalidArgument(
                    "tool_calls[].function.arguments: must be an object or the JSON text of one"
                ) from None
        elif not as_object and not isinstance(arguments, str):
            function["arguments"] = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        calls.append({**call, "type": "function", "function": function})
    return {**message, "tool_calls": calls}
