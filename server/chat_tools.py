"""The tools of a chat request: their validation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyllama.server.errors import InvalidRequest, NotSupported, ServerFault
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import read_flag, wrong_type


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
