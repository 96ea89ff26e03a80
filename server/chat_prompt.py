"""From the body of a chat request to the text of its prompt, and how the answer to it is steered and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyllama.chat.answer import AnswerShape
from pyllama.chat.reasoning_split import PromptEnd, ReasoningTags, prompt_end, tags_of_template
from pyllama.chat.thinking import thinking_rules
from pyllama.chat.tool_sets import ToolSet, ToolStyle, style_of_template, tool_schemas
from pyllama.grammar.guide import ThinkingRules
from pyllama.server.answer_format import answer_schema, follows_grammar
from pyllama.server.chat_messages import Conversation, read_messages, split_prefill
from pyllama.server.chat_tools import AskedTools, read_tools
from pyllama.server.errors import InvalidRequest, NotSupported
from pyllama.server.json_codec import type_name
from pyllama.server.request_fields import read_flag, read_reasoning_format, wrong_type
from pyllama.server.settings import ServerSettings
from pyllama.server.state import ServerState


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`markers`: texts that the reader of the answer looks for, so that they must not be hidden as control tokens.

    tools: that calls keep to. thinking: the block that the answer may begin with, None where it cannot.
    generation_prompt: what of the answer the prompt holds, its header included. given: the same of its content.
    """

    text: str
    shape: AnswerShape
    reasoning_format: str
    markers: tuple[str, ...] = ()
    tools: ToolSet | None = None
    thinking: ThinkingRules | None = None
    generation_prompt: str = ""
    given: str = ""


def template_variables(body: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    """What the template sees besides the messages; the request wins over the server. Raises `InvalidRequest`."""
    variables: dict[str, Any] = {"preserve_reasoning": settings.reasoning_preserve}
    variables["enable_thinking"] = settings.reasoning
    if settings.reasoning_effort == "none":
        variables["enable_thinking"] = False
    elif settings.reasoning_effort:
        variables["reasoning_effort"] = settings.reasoning_effort
    variables.update(settings.chat_template_kwargs)
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None:
        if not isinstance(kwargs, dict):
            raise wrong_type("chat_template_kwargs", "object", kwargs)
        variables.update(kwargs)
    thinking = variables.get("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise InvalidRequest(f'invalid type for "enable_thinking" (expected boolean, got {type_name(thinking)})')
    effort = body.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise wrong_type("reasoning_effort", "string", effort)
        if effort == "none":
            variables["enable_thinking"] = False
            variables.pop("reasoning_effort", None)
        else:
            variables["reasoning_effort"] = effort
    return variables


def chat_prompt(body: dict[str, Any], state: ServerState, *, tells_generation_prompt: bool = False) -> ChatPrompt:
    """Messages -> prompt. tells_generation_prompt: somebody wants to see it, at the price of a second rendering.

    Raises `InvalidRequest`, `NotSupported`, `TemplateError`.
    """
    settings, loaded = state.settings, state.loaded
    asked = read_tools(body)
    grammar_rules = follows_grammar(body, loaded.defaults, has_tools=bool(asked.shown))
    has_schema = answer_schema(body) is not None
    messages = read_messages(body)
    conversation = split_prefill(body, messages, prefill_enabled=settings.prefill_assistant)
    continues = conversation.prefill is not None
    add_generation_prompt = continues or read_flag(body.get("add_generation_prompt"), "add_generation_prompt", True)
    echo = read_flag(body.get("echo"), "echo", False)
    given_format = body.get("reasoning_format")
    reasoning_format = settings.reasoning_format if given_format is None else read_reasoning_format(given_format)
    variables = template_variables(body, settings)
    text = loaded.render_chat(
        conversation.messages,
        tools=asked.shown,
        add_generation_prompt=add_generation_prompt,
        variables=variables,
    )
    source = loaded.template_for(asked.shown).source
    tags = tags_of_template(source)
    given = ""
    if continues:
        text, given = continued(text, conversation, tags)
    elif tags is not None and add_generation_prompt and variables.get("enable_thinking") is False:
        text = switched_off(text, tags, source)
    # A user's grammar begins with the first token: a thinking block that the template opens is closed again.
    if grammar_rules and tags is not None and add_generation_prompt and prompt_end(text, tags) is PromptEnd.OPEN:
        text, given = without_thoughts(text, given, conversation, tags)

    parses_calls = read_flag(body.get("parse_tool_calls"), "parse_tool_calls", True) and settings.parses_chat
    tools = tool_set_of(asked, state) if asked.shown and not has_schema and not grammar_rules else None
    read_calls = tools if parses_calls else None
    reports_thoughts = reasoning_format != "none"
    # Calls are looked for after the thoughts, wherever these are shown.
    splits = tags is not None and settings.parses_chat and not grammar_rules
    splits = splits and (reports_thoughts or read_calls is not None)
    shape = AnswerShape(
        tags=tags if splits else None,
        opens_in_thoughts=tags is not None and prompt_end(text, tags) is PromptEnd.OPEN,
        given=given,
        echo=echo,
        thoughts_inline=reasoning_format in ("none", "deepseek-legacy"),
        reports_thoughts=reports_thoughts,
        tools=read_calls,
    )
    markers: tuple[str, ...] = () if tags is None or not splits else (tags.start, tags.end)
    if tools is not None:
        markers += tools.markers
    may_think = variables.get("enable_thinking") is not False
    thinking = None if tags is None else thinking_rules(text, given, tags, may_open=may_think)
    given_content = (conversation.prefill or "") if thinking is None and not conversation.in_thoughts else ""
    generation_prompt = ""
    if tells_generation_prompt:
        before = loaded.render_chat(
            conversation.messages, tools=asked.shown, add_generation_prompt=False, variables=variables
        )
        generation_prompt = (text + given).removeprefix(before) if text.startswith(before) else given
    return ChatPrompt(text + given, shape, reasoning_format, markers, tools, thinking, generation_prompt, given_content)


def tool_set_of(asked: AskedTools, state: ServerState) -> ToolSet:
    """How calls of these tools are written. Raises `NotSupported` for a family whose way of writing is not known."""
    style = ToolStyle.HERMES  # what templates without a place for tools are told to write
    template = state.loaded.template_for(asked.shown)
    capabilities = template.capabilities()
    parallel = asked.parallel
    if capabilities["supports_tools"]:
        known = style_of_template(template.source)
        if known is None:
            raise NotSupported(
                "Field 'tools': the way in which this chat template has calls written is not supported yet"
            )
        style = known
        if parallel is None:
            parallel = capabilities["supports_parallel_tool_calls"]
    return ToolSet(style, tool_schemas(asked.usable), parallel is not False, asked.required)


def continued(text: str, conversation: Conversation, tags: ReasoningTags | None) -> tuple[str, str]:
    """The prompt and what the client gave of the answer: the last assistant message, thoughts and all.

    text: the prompt up to the answer. Raises `InvalidRequest` for thoughts where the template has no place for them.
    """
    content = conversation.prefill or ""
    if tags is None:
        if conversation.in_thoughts:
            raise InvalidRequest(
                "Field 'continue_final_message': the chat template has no thinking tags, so no reasoning to continue"
            )
        return text, content
    end = prompt_end(text, tags)
    if conversation.in_thoughts or (conversation.thoughts and end is not PromptEnd.CLOSED):
        if end is PromptEnd.CLOSED:
            raise InvalidRequest("Cannot continue reasoning_content: thinking is turned off.")
        if end is PromptEnd.PLAIN:
            text += f"{tags.start}\n"
        if conversation.in_thoughts:
            return text, conversation.thoughts
        return text, f"{conversation.thoughts}\n{tags.end}\n\n{content}"
    if end is PromptEnd.OPEN:
        if content.lstrip().startswith(tags.start):  # the client wrote the block itself
            return text[: text.rindex(tags.start)], content
        text += f"\n{tags.end}\n\n"
    return text, content


def switched_off(text: str, tags: ReasoningTags, source: str) -> str:
    """The prompt with thinking off. Where the template `source` has not seen to it the block is closed, or an empty one
    is written."""
    end = prompt_end(text, tags)
    if end is PromptEnd.OPEN:
        return text + tags.end
    writes_blocks = tags.start in source and "enable_thinking" not in source
    return text + tags.start + tags.end if end is PromptEnd.PLAIN and writes_blocks else text


def without_thoughts(text: str, given: str, conversation: Conversation, tags: ReasoningTags) -> tuple[str, str]:
    """The prompt with the thinking block that it opens closed."""
    closing = f"\n{tags.end}\n\n"
    if conversation.in_thoughts or given:
        return text, f"{given}{closing}" if conversation.in_thoughts else given
    return text + closing, given
