"""The tools of a chat request, and whether they must be called: validation. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyllama.server.errors import InvalidRequest, ServerFault
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import read_flag, wrong_type

log = logging.getLogger("pyllama.server.srv")


@dataclass(frozen=True, slots=True)
class AskedTools:
    """shown: the tools that the template shows. callable: names of those that the model may call; `required`: it must.

    parallel: whether an answer may hold several calls; None: as the template says.
    """

    shown: list[dict[str, Any]]
    callable: frozenset[str] = frozenset()
    required: bool = False
    parallel: bool | None = None

    @property
    def usable(self) -> list[dict[str, Any]]:
        return [tool for tool in self.shown if tool["function"]["name"] in self.callable]


def read_tools(body: Mapping[str, Any]) -> AskedTools:
    """No tools with `tool_choice` none. Raises `InvalidRequest`, `ServerFault` where llama-server answers 500."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise wrong_type("tools", "array", tools)
    names: set[str] = set()
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise ServerFault("Failed to parse tools: every tool must have the type 'function' and a 'function'")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ServerFault("Failed to parse tools: a function has no name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ServerFault("Failed to parse tools: 'parameters' must be an object")
        names.add(function["name"])
    parallel = body.get("parallel_tool_calls")
    if parallel is not None:
        parallel = read_flag(parallel, "parallel_tool_calls", True)
    required, chosen = _read_choice(body.get("tool_choice"))
    if not tools:
        if chosen:
            raise InvalidRequest(f"Field 'tool_choice': there is no tool '{min(chosen)}'")
        if required:  # llama-server takes this
            log.warning("tool_choice asks for a call, but the request has no tools: the answer is text")
        return AskedTools([])
    if chosen is not None and not chosen:
        return AskedTools([])
    for name in chosen or ():
        if name not in names:
            raise InvalidRequest(f"Field 'tool_choice': there is no tool '{name}'")
    if body.get("grammar"):
        raise InvalidRequest("Cannot use custom grammar constraints with tools.")
    return AskedTools(tools, frozenset(names if chosen is None else chosen), required, parallel)


def _read_choice(choice: Any) -> tuple[bool, frozenset[str] | None]:
    """Whether a call must be made, and of which tools calls may be; None: of any."""
    if choice is None or choice == "auto":
        return False, None
    if choice == "none":
        return False, frozenset()
    if choice == "required":
        return True, None
    if isinstance(choice, str):
        raise InvalidRequest(f"Invalid tool_choice: {choice}")
    if not isinstance(choice, dict):
        raise InvalidRequest(f"Field 'tool_choice': type must be string or object, but is {type_name(choice)}")
    kind = choice.get("type")
    if kind == "function":
        return True, frozenset({_function_name(choice)})
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
            raise InvalidRequest("Field 'tool_choice.allowed_tools': needs 'tools' and the 'mode' 'auto' or 'required'")
        return mode == "required", frozenset(_function_name(tool) for tool in tools)
    raise InvalidRequest("Field 'tool_choice': the type must be 'function' or 'allowed_tools'")


def _function_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("Field 'tool_choice': names no function")
    return name
