"""The model's chat template as the server uses it: fitted messages in, prompt text out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pyllama.chat.tools_as_text import with_arguments
from pyllama.errors import TemplateError
from pyllama.server.chat_messages import with_leading_system, with_text_content
from pyllama.server.errors import InvalidRequest

log = logging.getLogger("pyllama.server.srv")

TOOL_VARIANT = "tool_use"
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt")

# What `/props` calls each capability -> attribute of the template's capabilities.
CAPABILITIES = {
    "supports_object_arguments": "object_arguments",
    "supports_parallel_tool_calls": "parallel_tool_calls",
    "supports_preserve_reasoning": "preserve_reasoning",
    "supports_reasoning_effort": "reasoning_effort",
    "supports_string_content": "string_content",
    "supports_system_role": "system_role",
    "supports_tool_calls": "tool_calls",
    "supports_tools": "tools",
    "supports_typed_content": "typed_content",
}


class ServerTemplate:
    """Wraps a `pyllama.chat_template.ChatTemplate`.

    tool_use: the model's own template for requests with tools. merges_system: system messages after the first message
    are moved to it where the template would refuse or drop them.
    """

    def __init__(
        self, template: Any, tokenizer: Any, tool_use: ServerTemplate | None = None, *, merges_system: bool = True
    ) -> None:
        self.tool_use = tool_use
        self._merges_system = merges_system
        self._template = template
        self._tokenizer = tokenizer
        self.source: str = template.source

    def capabilities(self) -> dict[str, bool]:
        found = self._template.capabilities
        return {name: bool(getattr(found, attribute)) for name, attribute in CAPABILITIES.items()}

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text, without a BOS that tokenising adds. Raises `TemplateError` with the template's own words."""
        from pyllama.chat_template import without_duplicate_special

        for name in RESERVED_VARIABLES:
            if name in variables:
                raise InvalidRequest(f"Field 'chat_template_kwargs': the name '{name}' is reserved")
        fitted = self._fit(list(messages))
        text = self._template.render(
            fitted, add_generation_prompt=add_generation_prompt, tools=list(tools) or None, **variables
        )
        return without_duplicate_special(text, self._tokenizer)

    def _fit(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in the form that this template can take."""
        if "<|channel|>" not in self.source:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if (
            any(isinstance(message.get("content"), list) for message in messages)
            and not self._template.capabilities.typed_content
        ):
            messages = with_text_content(messages)
        is_late = any(message["role"] == "system" for message in messages[1:])
        if is_late and self._merges_system:
            found = self._template.capabilities
            if found.system_role and not found.late_system:
                messages = with_leading_system(messages)
        if any(message.get("tool_calls") for message in messages):
            as_object = self._template.capabilities.object_arguments
            messages = [with_arguments(message, as_object=as_object) for message in messages]
        return messages


def load_template(
    override: str, metadata: Mapping[str, Any], tokenizer: Any, *, merges_system: bool = True
) -> tuple[ServerTemplate | None, TemplateError | None]:
    """The template, or the reason why there is none: a bad template does not keep the server from completing text."""
    from pyllama.chat_template import template_from_metadata

    try:
        tool_use = None if override else _tool_template(metadata, tokenizer, merges_system)
        template = template_from_metadata(metadata, tokenizer, override or None)
        return ServerTemplate(template, tokenizer, tool_use, merges_system=merges_system), None
    except TemplateError as error:
        if override:
            raise  # the user's own choice: a clear failure at the start helps more
        return None, error


def _tool_template(metadata: Mapping[str, Any], tokenizer: Any, merges_system: bool) -> ServerTemplate | None:
    """The file's template for requests with tools. One that cannot be used leaves them the ordinary one."""
    from pyllama.chat_template import TEMPLATE_KEY, template_from_metadata

    key = f"{TEMPLATE_KEY}.{TOOL_VARIANT}"
    if key not in metadata:
        return None
    try:
        template = template_from_metadata(metadata, tokenizer, variant=TOOL_VARIANT)
        return ServerTemplate(template, tokenizer, merges_system=merges_system)
    except TemplateError as error:
        log.warning("%s cannot be used, requests with tools get the ordinary template: %s", key, error)
        return None
