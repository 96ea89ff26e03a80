"""From the text of a generation to the parts of a chat message: thoughts, answer and tool calls. Pure.

Streams and plain answers use the same parser, so the sum of a stream's deltas is the plain message.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from pyllama.chat.reasoning_split import ReasoningSplitter, ReasoningTags
from pyllama.chat.tool_calls import Part, ToolCall, call_reader
from pyllama.chat.tool_sets import ToolSet
from pyllama.grammar.guide import ThinkingGate, ThinkingRules

Delta = dict[str, Any]
"""A part of a message, of one kind: `{"reasoning_content": ...}`, `{"content": ...}` or `{"tool_calls": [...]}`."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How to read an answer.

    tags: None where thoughts stay in the content. opens_in_thoughts: the prompt ends inside a thinking block.
    given: what the client wrote of the answer, after which the model went on; with `echo` it is repeated.
    thoughts_inline: thoughts stay in the content, with their tags, and calls are looked for after them.
    reports_thoughts: they are told apart (too). tools: None where calls stay in the content.
    """

    tags: ReasoningTags | None = None
    opens_in_thoughts: bool = False
    given: str = ""
    echo: bool = False
    thoughts_inline: bool = False
    reports_thoughts: bool = True
    tools: ToolSet | None = None


class _InlineThoughts:
    """Text in, (text up to the end of the thinking block, text after it) out. Nothing is dropped."""

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        self._gate = ThinkingGate(ThinkingRules(tags.start, tags.end, is_open=is_open))
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        if self._gate.is_over or not text:
            return "", text
        held = self._held + text
        rest = self._gate.push(text.encode("utf-8", "surrogatepass"))
        if rest is None and not self._gate.is_inside:
            self._held = held
            return "", ""
        self._held = ""
        if rest is None:
            return held, ""
        if not self._gate.has_thought:
            return "", held
        answer = rest.decode("utf-8", "surrogatepass")
        return held[: len(held) - len(answer)], answer

    def finish(self) -> tuple[str, str]:
        rest, self._held = self._held, ""
        return "", rest


class AnswerParser:
    """Text of one choice in, deltas out, and at the end the message. Text given out is never revised."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._splitter = None
        if shape.tags is not None:
            self._splitter = ReasoningSplitter(shape.tags, is_open=shape.opens_in_thoughts)
        self._inline = None
        if shape.tags is not None and shape.thoughts_inline:
            self._inline = _InlineThoughts(shape.tags, is_open=shape.opens_in_thoughts)
        self._reader = None if shape.tools is None else call_reader(shape.tools)
        self._calls: list[dict[str, Any]] = []
        self._thoughts: list[str] = []
        self._content: list[str] = []
        # White space at its end would be held back, and come out again as if the model had written it.
        given = self._read(shape.given if shape.echo else shape.given.rstrip())
        self._waiting: list[Delta] = []
        if shape.echo:
            self._waiting = given
        else:
            self._thoughts.clear()
            self._content.clear()
            self._calls.clear()

    def push(self, text: str) -> list[Delta]:
        """The deltas that `text` makes certain."""
        waiting, self._waiting = self._waiting, []
        return waiting + self._read(text)

    def finish(self) -> list[Delta]:
        """The rest, once the generation has ended."""
        deltas, self._waiting = self._waiting, []
        if self._splitter is not None:
            deltas += self._deltas(*self._splitter.finish(), raw="")
        if self._inline is not None:
            deltas += self._content_deltas(*self._inline.finish())
        if self._reader is not None:
            deltas += self._answer_deltas(self._reader.finish())
        return deltas

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def message(self) -> dict[str, Any]:
        """The whole message, after `finish`."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._thoughts and self._shape.reports_thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _read(self, text: str) -> list[Delta]:
        if self._splitter is None:
            return self._deltas("", text, raw=text)
        return self._deltas(*self._splitter.push(text), raw=text)

    def _deltas(self, thoughts: str, answer: str, *, raw: str) -> list[Delta]:
        """raw: the text as the model wrote it, which is the content when thoughts stay in it."""
        deltas: list[Delta] = []
        if thoughts:
            self._thoughts.append(thoughts)
            if not self._shape.thoughts_inline:
                deltas.append({"reasoning_content": thoughts})
        if self._inline is not None:
            return deltas + self._content_deltas(*self._inline.push(raw))
        return deltas + self._content_deltas("", answer)

    def _content_deltas(self, thoughts: str, answer: str) -> list[Delta]:
        """thoughts: those that stay in the content, where no calls are."""
        deltas = self._answer_deltas([thoughts] if thoughts else [])
        if answer:
            deltas += self._answer_deltas([answer] if self._reader is None else self._reader.push(answer))
        return deltas

    def _answer_deltas(self, parts: list[Part]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if isinstance(part, ToolCall):
                deltas += self._call_deltas(part)
            else:
                self._content.append(part)
                deltas.append({"content": part})
        return deltas

    def _call_deltas(self, call: ToolCall) -> list[Delta]:
        """First what the call is, once; then only arguments."""
        if self._calls and self._shape.tools is not None and not self._shape.tools.parallel:
            return []  # one call was asked for
        index, call_id = len(self._calls), call.id or secrets.token_hex(16)
        function = {"name": call.name, "arguments": call.arguments}
        self._calls.append({"type": "function", "function": function, "id": call_id})
        head = {"index": index, "id": call_id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        return [
            {"tool_calls": [head]},
            {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
        ]


def whole_answer(shape: AnswerShape, text: str) -> AnswerParser:
    """The parser after all of `text`."""
    parser = AnswerParser(shape)
    parser.push(text)
    parser.finish()
    return parser
