"""`ChatTemplate`: from chat messages to the text of the prompt, by the Jinja template of a model.

The sandbox is in `chat_template_sandbox.py`, templates by name in `chat_template_builtins.py`. Checking a request's
messages, choosing what to do with roles a template lacks, and parsing answers are the server's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError

from pyllama.chat_template_builtins import BUILTIN_TEMPLATES, DEFAULT_TEMPLATE
from pyllama.chat_template_sandbox import BUDGET_NAME, MAX_TEXT_LENGTH, Budget, TemplateEnvironment, TemplateRaised
from pyllama.errors import TemplateError
from pyllama.tokenizer import Tokenizer

Message = Mapping[str, Any]

TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a template does with the parts of a conversation, found by rendering small ones."""

    string_content: bool
    typed_content: bool
    """Content may be an array of parts such as `{"type": "text", "text": ...}`."""
    system_role: bool
    late_system: bool
    """A system message may come after others."""
    tools: bool
    tool_calls: bool
    parallel_tool_calls: bool
    object_arguments: bool
    """Arguments of tool calls should be objects, not JSON texts."""
    thinking: bool
    """`enable_thinking` changes the prompt."""
    reasoning_effort: bool
    preserve_reasoning: bool
    """`reasoning_content` of earlier turns is shown when `preserve_reasoning` (or `preserve_thinking`) is true."""


class ChatTemplate:
    """A compiled chat template. Immutable; may be used from several threads at once.

    source: Jinja text. bos_token, eos_token: texts of these tokens, for the template's variables of that name.
    Raises `TemplateError` when the source is no valid template (with the line).
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        try:
            self._template = TemplateEnvironment().compile_source(source)
        except TemplateSyntaxError as error:
            raise TemplateError(f"invalid chat template, line {error.lineno}: {error.message}") from error
        except (JinjaError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise TemplateError(f"invalid chat template: {error or type(error).__name__}") from error

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text.

        variables: further names for the template, such as `enable_thinking`; `bos_token` and `eos_token` may be
        replaced too, `messages` may not. Raises `TemplateError`: with the template's own words when it refuses the
        messages, otherwise saying what failed.
        """
        context: dict[str, Any] = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        context.update(variables)
        context.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        context[BUDGET_NAME] = Budget()
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(context):
                parts.append(part)
                length += len(part)
                if length > MAX_TEXT_LENGTH:
                    raise TemplateError(f"the chat template wrote more than {MAX_TEXT_LENGTH} characters")
        except TemplateRaised as error:
            raise TemplateError(error.message or "the chat template refused the messages") from error
        except TemplateError:
            raise
        except Exception as error:  # a template can provoke any error of Python; all are the template's fault
            raise TemplateError(f"chat template failed: {type(error).__name__}: {error}") from error
        return "".join(parts)

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        return _probe(self)


def template_from_metadata(
    metadata: Mapping[str, Any],
    tokenizer: Tokenizer,
    override: str | None = None,
    *,
    variant: str | None = None,
) -> ChatTemplate:
    """The template of a GGUF file, or ChatML when it has none.

    override: name of a built-in template, or Jinja source, used instead. variant: the named template
    (`tokenizer.chat_template.<variant>`, e.g. `tool_use`) where the file has it.
    Raises `TemplateError` for an unknown name or an invalid template.
    """
    if override:
        source = _named_or_source(override)
    else:
        keys = [f"{TEMPLATE_KEY}.{variant}"] if variant else []
        source = next(
            (metadata[key] for key in [*keys, TEMPLATE_KEY] if key in metadata), BUILTIN_TEMPLATES[DEFAULT_TEMPLATE]
        )
        if not isinstance(source, str):
            raise TemplateError(f"{TEMPLATE_KEY}: found {type(source).__name__}, expected a string")
    return ChatTemplate(
        source, bos_token=_token_text(tokenizer, tokenizer.bos_id), eos_token=_token_text(tokenizer, tokenizer.eos_id)
    )


def without_duplicate_special(prompt: str, tokenizer: Tokenizer) -> str:
    """`prompt` less a BOS at its start and an EOS at its end, where encoding with `add_special` adds them again."""
    bos = _token_text(tokenizer, tokenizer.bos_id) if tokenizer.add_bos else ""
    eos = _token_text(tokenizer, tokenizer.eos_id) if tokenizer.add_eos else ""
    if bos:
        prompt = prompt.removeprefix(bos)
    if eos:
        prompt = prompt.removesuffix(eos)
    return prompt


def _named_or_source(override: str) -> str:
    if override in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[override]
    if "{%" in override or "{{" in override:
        return override
    raise TemplateError(
        f"unknown chat template {override[:80]!r}: expected Jinja source or one of {', '.join(BUILTIN_TEMPLATES)}"
    )


def _token_text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token, special=True).decode("utf-8", "replace")


_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe-description",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]},
    },
}


def _tool_call(name: str, arguments: Any) -> dict[str, Any]:
    # Some templates insist on ids of nine letters and digits.
    return {"id": f"call{name[-1]}1234", "type": "function", "function": {"name": name, "arguments": arguments}}


def _probe(template: ChatTemplate) -> TemplateCapabilities:
    def render(*messages: Message, **variables: Any) -> str:
        """Empty for what the template refuses: a capability it lacks."""
        try:
            return template.render(messages, **variables)
        except TemplateError:
            return ""

    def parts(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    plain = render({"role": "user", "content": "probe-user"})
    typed = render({"role": "user", "content": parts("probe-part")})
    string_content = "probe-user" in plain
    typed_content = "probe-part" in typed and "'text'" not in typed and '"text"' not in typed

    def say(role: str, text: str, **fields: Any) -> Message:
        """A message in a form that the template takes."""
        return {"role": role, "content": parts(text) if typed_content and not string_content else text, **fields}

    def calling(*calls: Mapping[str, Any]) -> str:
        results = [say("tool", "probe-result", tool_call_id=call["id"], name="probe") for call in calls]
        return render(user, say("assistant", "", tool_calls=calls), *results, user, tools=[_TOOL])

    user = say("user", "probe-user")
    with_text = calling(_tool_call("probe_a", '{"probe_key": "probe-value"}'))
    with_object = calling(_tool_call("probe_a", {"probe_key": "probe-value"}))
    # Joined to a text, an object shows as Python writes it: then the template wants JSON texts.
    object_arguments = "probe-value" in with_object and "{'probe_key'" not in with_object
    argument = {"probe_key": "v"} if object_arguments else '{"probe_key": "v"}'
    with_two = calling(_tool_call("probe_a", argument), _tool_call("probe_b", argument))
    reasoned = say("assistant", "probe-answer", reasoning_content="probe-reasoning")
    return TemplateCapabilities(
        string_content=string_content,
        typed_content=typed_content,
        system_role="probe-system" in render(say("system", "probe-system"), user),
        late_system="probe-late"
        in render(say("system", "probe-system"), user, say("assistant", "a"), say("system", "probe-late"), user),
        tools="probe_tool" in render(user, tools=[_TOOL]),
        tool_calls=any("probe_a" in text for text in (with_text, with_object)),
        parallel_tool_calls="probe_a" in with_two and "probe_b" in with_two,
        object_arguments=object_arguments,
        thinking=render(user, enable_thinking=True) != render(user, enable_thinking=False),
        reasoning_effort=render(user, reasoning_effort="low") != render(user, reasoning_effort="high"),
        preserve_reasoning="probe-reasoning"
        in render(user, reasoned, user, preserve_reasoning=True, preserve_thinking=True),
    )
