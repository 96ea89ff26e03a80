"""Validation and normalisation of a chat request's `messages`, before the template sees them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyllama.server.errors import InvalidRequest, ServerFault
from pyllama.server.json_codec import type_name

KEPT_FIELDS = ("role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id")
MEDIA_PARTS = frozenset({"image_url", "input_audio", "input_video", "video_url"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the template, and the content and thoughts of an assistant message that the model continues.

    in_thoughts: it is the thoughts that go on.
    """

    messages: list[dict[str, Any]]
    prefill: str | None = None
    thoughts: str = ""
    in_thoughts: bool = False


def read_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The `messages` with the fields that templates know.

    Raises `InvalidRequest`, or `ServerFault` where llama-server answers 500.
    """
    messages = body.get("messages")
    if messages is None:
        raise InvalidRequest("'messages' is required")
    if not isinstance(messages, list):
        raise InvalidRequest("Expected 'messages' to be an array")
    return [_read_message(message, index) for index, message in enumerate(messages)]


def _read_message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"messages[{index}]: must be an object, but is {type_name(message)}")
    role = message.get("role")
    if role is None:
        # Without a role nothing says that this is an assistant, so the key `content` is asked for first.
        if "content" not in message:
            raise InvalidRequest("All non-assistant messages must contain 'content'")
        raise ServerFault(f"Failed to parse messages: messages[{index}] has no 'role'")
    if not isinstance(role, str):
        raise InvalidRequest(f"messages[{index}].role: type must be string, but is {type_name(role)}")
    if role == "assistant":
        if "content" not in message and message.get("tool_calls") is None:
            raise InvalidRequest("Assistant message must contain either 'content' or 'tool_calls'!")
    elif "content" not in message:
        raise InvalidRequest("All non-assistant messages must contain 'content'")

    # Templates join the content with other text: it is always there, and empty where there is none.
    result = {"content": ""}
    result.update((name, message[name]) for name in KEPT_FIELDS if message.get(name) is not None)
    content = message.get("content")
    if content is not None and not isinstance(content, (str, list)):
        raise InvalidRequest("Expected 'content' to be a string or an array")
    if isinstance(content, list):
        result["content"] = [_read_part(part) for part in content]
    for name in ("reasoning_content", "name", "tool_call_id"):
        if name in result and not isinstance(result[name], str):
            raise InvalidRequest(f"messages[{index}].{name}: type must be string, but is {type_name(result[name])}")
    if "tool_calls" in result:
        _check_tool_calls(result["tool_calls"], index)
    return result


def _read_part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise InvalidRequest(f"content[]: must be objects, but found {type_name(part)}")
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"content[].text: type must be string, but is {type_name(text)}")
        return {"type": "text", "text": text}
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        medium = "image" if kind == "image_url" else "audio" if kind == "input_audio" else "video"
        raise ServerFault(
            f"{medium} input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
        )
    raise InvalidRequest("unsupported content[].type")


def _check_tool_calls(calls: Any, index: int) -> None:
    if not isinstance(calls, list):
        raise InvalidRequest(f"messages[{index}].tool_calls: type must be array, but is {type_name(calls)}")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(function, dict):
            raise ServerFault(f"Failed to parse messages: messages[{index}] has a tool call that is not a function")
        if not isinstance(function.get("name"), str):
            raise ServerFault(f"Failed to parse messages: messages[{index}] has a tool call without a name")


def split_prefill(body: dict[str, Any], messages: list[dict[str, Any]], *, prefill_enabled: bool) -> Conversation:
    """Decide whether the last assistant message is continued. Raises `InvalidRequest`."""
    continues = body.get("continue_final_message")
    if continues is not None and not isinstance(continues, (bool, str)):
        raise InvalidRequest(
            f"Field 'continue_final_message': type must be boolean or string, but is {type_name(continues)}"
        )
    if isinstance(continues, str) and continues not in ("content", "reasoning_content"):
        raise InvalidRequest(
            f"Field 'continue_final_message': must be a boolean, 'content' or 'reasoning_content', but is '{continues}'"
        )
    if continues and body.get("add_generation_prompt") is True:
        raise InvalidRequest("Cannot set both add_generation_prompt and continue_final_message to true.")
    ends_with_assistant = bool(messages) and messages[-1]["role"] == "assistant"
    if not continues:
        if not (prefill_enabled and ends_with_assistant):
            return Conversation(messages)
    elif not ends_with_assistant:
        raise InvalidRequest("continue_final_message needs an assistant message at the end of the list.")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise InvalidRequest("Cannot have 2 or more assistant messages at the end of the list.")
    last = messages[-1]
    if last.get("tool_calls"):
        raise InvalidRequest("Cannot continue an assistant message that contains tool calls.")
    content = last.get("content") or ""
    if isinstance(content, list):
        content = "\n\n".join(part["text"] for part in content)
    thoughts = last.get("reasoning_content") or ""
    in_thoughts = continues == "reasoning_content" or (continues != "content" and bool(thoughts) and not content)
    if in_thoughts and content:
        raise InvalidRequest("Cannot continue the reasoning_content of an assistant message that has content.")
    return Conversation(messages[:-1], content, thoughts, in_thoughts)


def with_leading_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that take one system message, at the beginning: all of them joined there by an empty line."""
    said = [message["content"] for message in messages if message["role"] == "system"]
    if all(isinstance(content, str) for content in said):
        merged: Any = "\n\n".join(said)
    else:
        merged = [
            part
            for content in said
            for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])
        ]
    return [{"role": "system", "content": merged}, *(message for message in messages if message["role"] != "system")]


def with_text_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that take strings only: text parts joined by a line break."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
