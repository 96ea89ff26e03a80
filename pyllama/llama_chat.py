"""Chats of `Llama` with tools and thoughts: what a call asks for, the prompt of it, and the shapes of its answer.

Nothing here touches an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from pyllama.chat.answer import AnswerParser, AnswerShape, whole_answer
from pyllama.chat.reasoning_split import PromptEnd, prompt_end, tags_of_template
from pyllama.chat.thinking import thinking_rules
from pyllama.chat.tool_grammar import check_tools, tool_grammar, tool_triggers
from pyllama.chat.tool_sets import ToolSet, ToolStyle, style_of_template, tool_schemas
from pyllama.chat.tools_as_text import with_arguments, with_calls_as_text, with_tools_as_text
from pyllama.chat_template import ChatTemplate, without_duplicate_special
from pyllama.completion import (
    Collected,
    CompletionRequest,
    MoreSampling,
    TextDelta,
    TokenText,
    chat_chunk,
    response_of_message,
    with_plain_content,
)
from pyllama.completion_types import ChatCompletion, ChatCompletionChunk, ChatFinishReason
from pyllama.errors import InvalidArgument
from pyllama.grammar import GrammarCompiler, GrammarError, GrammarSource
from pyllama.grammar.guide import BudgetRules, Guide, GuideSource, compile_guide
from pyllama.tokenizer import Tokenizer

REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")


class ChatOptions(TypedDict, total=False):
    """Options of chats that llama-cpp-python has no arguments for; meanings: `Llama.create_chat_completion`."""

    parallel_tool_calls: bool
    reasoning_format: str
    reasoning_budget: int
    reasoning_budget_message: str
    chat_template_kwargs: Mapping[str, Any]


class MoreChat(MoreSampling, ChatOptions, total=False):
    """All that a chat takes by name beyond llama-cpp-python's arguments."""


def split_options(options: MoreChat) -> tuple[ChatOptions, MoreSampling]:
    chat: Any = {name: value for name, value in options.items() if name in ChatOptions.__annotations__}
    sampling: Any = {name: value for name, value in options.items() if name not in ChatOptions.__annotations__}
    return chat, sampling


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """text: the prompt. shape: how the answer is read; None: it is content as it stands.

    guide: what steers it. shown: control tokens that are part of its text.
    """

    text: str
    shape: AnswerShape | None
    guide: GuideSource
    shown: frozenset[int]
    tools: ToolSet | None = None

    def compile(self, grammars: GrammarCompiler, tokenizer: Tokenizer, banned: frozenset[int]) -> Guide | None:
        """Raises `GrammarError` for a grammar or a schema that cannot be kept to."""
        if not self.guide.acts:
            return None

        def piece(token: int) -> bytes:
            return tokenizer.piece(token, special=token in self.shown)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special=False, parse_special=True)

        try:
            return compile_guide(self.guide, grammars, piece, encode).copy(banned)
        except GrammarError as error:
            if self.tools is not None:
                check_tools(self.tools, grammars, error)
            raise


class ShownTokens:
    """A tokenizer for texts in which some control tokens are shown."""

    def __init__(self, tokenizer: TokenText, shown: frozenset[int]) -> None:
        self._tokenizer, self._shown = tokenizer, shown

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._tokenizer.piece(token, special=special or token in self._shown)

    def is_eog(self, token: int) -> bool:
        return self._tokenizer.is_eog(token)


def plan_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    marker: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    grammar: GrammarSource | None,
    is_schema: bool,
    options: ChatOptions,
) -> ChatPlan:
    """marker: `GrammarCompiler.marker`. is_schema: `grammar` is the form of the answer, and may follow thoughts.

    Raises `InvalidArgument`, `TypeError`, `TemplateError`.
    """
    shown_tools, names, required = _read_tools(tools, tool_choice)
    if shown_tools and grammar is not None and not is_schema:
        raise InvalidArgument("grammar and tools cannot be used together; response_format can")
    reasoning_format = options.get("reasoning_format", "none")
    if reasoning_format not in REASONING_FORMATS:
        raise InvalidArgument(f"reasoning_format {reasoning_format!r}, expected one of {', '.join(REASONING_FORMATS)}")
    kwargs = options.get("chat_template_kwargs") or {}
    text = without_duplicate_special(_render(template, messages, shown_tools, kwargs), tokenizer)
    tags = tags_of_template(template.source)
    tool_set = None
    if shown_tools and grammar is None:
        tool_set = _tool_set(template, shown_tools, names, required, options.get("parallel_tool_calls"))
    splits = tags is not None and (reasoning_format != "none" or tool_set is not None)
    if grammar is not None and not (is_schema and splits):
        # The grammar begins with the first token: thoughts have no place any more.
        splits = False
        if tags is not None and prompt_end(text, tags) is PromptEnd.OPEN:
            text += f"\n{tags.end}\n\n"
    shape = None
    if splits or tool_set is not None:
        shape = AnswerShape(
            tags=tags if splits else None,
            opens_in_thoughts=tags is not None and prompt_end(text, tags) is PromptEnd.OPEN,
            thoughts_inline=reasoning_format in ("none", "deepseek-legacy"),
            reports_thoughts=reasoning_format != "none",
            tools=tool_set,
        )
    thinking = None
    if tags is not None and (grammar is None or splits):
        thinking = thinking_rules(text, "", tags, may_open=kwargs.get("enable_thinking") is not False)
    budget = None
    if thinking is not None:
        opened = f"{thinking.start}{thinking.so_far}" if thinking.is_open else ""
        tokens, message = options.get("reasoning_budget", -1), options.get("reasoning_budget_message", "")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not isinstance(message, str):
            raise TypeError("reasoning_budget must be an int and reasoning_budget_message a str")
        budget = BudgetRules(thinking.start, (thinking.end,), tokens, message, prompt=opened)
    guide = GuideSource(
        grammar if tool_set is None else tool_grammar(tool_set, marker),
        () if tool_set is None or required else tool_triggers(tool_set),
        thinking,
        budget,
        is_forgiving=tool_set is not None,
    )
    markers = (tags.start, tags.end) if tags is not None and shape is not None else ()
    if tool_set is not None:
        markers += tool_set.markers
    return ChatPlan(text, shape, guide, _hidden(markers, tokenizer), tool_set)


def _read_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]], frozenset[str], bool]:
    """The tools to show, names of those that may be called, and whether one must be."""
    if tools is not None and (isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence)):
        raise TypeError(f"tools must be a sequence of dictionaries, found {type(tools).__name__}")
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidArgument(f"tools[{index}] must have the type 'function', and a 'function' with a name")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise InvalidArgument(f"tools[{index}]: 'parameters' must be a dictionary")
        found.append(dict(tool))
    names = frozenset(tool["function"]["name"] for tool in found)
    if choice is None or choice == "auto":
        return found, names, False
    if choice == "none":
        return [], frozenset(), False
    if choice == "required":
        if not found:
            raise InvalidArgument("tool_choice='required' needs tools")
        return found, names, True
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidArgument(f"tool_choice {choice!r}, expected 'auto', 'none', 'required' or a function by name")
    if name not in names:
        raise InvalidArgument(f"tool_choice: there is no tool '{name}'")
    return found, frozenset({name}), True


def _tool_set(
    template: ChatTemplate,
    tools: Sequence[dict[str, Any]],
    names: frozenset[str],
    required: bool,
    parallel: bool | None,
) -> ToolSet:
    style: ToolStyle | None = ToolStyle.HERMES
    if template.capabilities.tools:
        style = style_of_template(template.source)
        if style is None:
            raise InvalidArgument("tools: the way in which this chat template has calls written is not supported yet")
        parallel = template.capabilities.parallel_tool_calls if parallel is None else parallel
    usable = [tool for tool in tools if tool["function"]["name"] in names]
    return ToolSet(style, tool_schemas(usable), parallel is not False, required)


def _render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[dict[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a sequence of dictionaries, found {type(messages).__name__}")
    if not isinstance(variables, Mapping):
        raise TypeError(f"chat_template_kwargs must be a mapping, found {type(variables).__name__}")
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise InvalidArgument(f"chat_template_kwargs: the name '{name}' is reserved")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}] must be a dictionary, found {type(message).__name__}")
    typed = any(not isinstance(message.get("content"), (str, type(None))) for message in messages)
    fitted = [dict(message) for message in messages]
    if typed and not template.capabilities.typed_content:
        fitted = [with_plain_content(message) for message in messages]
    if tools and not template.capabilities.tools:
        fitted = with_tools_as_text(fitted, tools, system_role=template.capabilities.system_role)
        tools = ()
    if any(message.get("tool_calls") or message.get("role") == "tool" for message in fitted):
        if not template.capabilities.tool_calls:
            fitted = with_calls_as_text(fitted)
        fitted = [with_arguments(message, as_object=template.capabilities.object_arguments) for message in fitted]
    return template.render(fitted, add_generation_prompt=True, tools=list(tools) or None, **variables)


def _hidden(markers: Sequence[str], tokenizer: Tokenizer) -> frozenset[int]:
    """Those of `markers` that are control tokens, whose text an answer would not hold otherwise."""
    found = set()
    for marker in markers:
        tokens = tokenizer.encode(marker, add_special=False, parse_special=True)
        if len(tokens) == 1 and not tokenizer.is_eog(tokens[0]) and not tokenizer.piece(tokens[0]):
            found.add(tokens[0])
    return frozenset(found)


# -------------------------------------------------------------------------------- answers


def shaped_response(request: CompletionRequest, collected: Collected, shape: AnswerShape) -> ChatCompletion:
    answer = whole_answer(shape, collected.text)
    message: Any = answer.message()
    if answer.has_calls and not message["content"]:
        message["content"] = None
    return response_of_message(request, collected, message, _reason(answer, collected.finish_reason))


def shaped_chunks(
    request: CompletionRequest, deltas: Iterable[TextDelta], shape: AnswerShape
) -> Iterator[ChatCompletionChunk]:
    """A chunk with the role, chunks of one kind each, a chunk with the finish reason and an empty delta.

    Probabilities of tokens whose text is held back come with the next chunk.
    """
    yield chat_chunk(request, {"role": "assistant"}, (), None)
    parser = AnswerParser(shape)
    waiting: list[Any] = []
    for delta in deltas:
        waiting += delta.records
        parts: list[Any] = parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += parser.finish()
        for part in parts:
            yield chat_chunk(request, part, waiting, None)
            waiting = []
        if delta.finish_reason is not None:
            yield chat_chunk(request, {}, waiting, _reason(parser, delta.finish_reason))


def _reason(answer: AnswerParser, reason: ChatFinishReason) -> ChatFinishReason:
    return "tool_calls" if reason == "stop" and answer.has_calls else reason
