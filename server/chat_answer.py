"""From the text of a generation to the parts of a chat message: thoughts and answer. Pure.

Streams and plain answers use the same parser, so the sum of a stream's deltas is the plain message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyllama.server.reasoning_split import ReasoningSplitter, ReasoningTags

Delta = dict[str, Any]
"""A part of a message, of one kind: `{"reasoning_content": ...}` or `{"content": ...}`."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How to read an answer.

    tags: None where thoughts stay in the content. opens_in_thoughts: the prompt ends inside a thinking block.
    given: what the client wrote of the answer, after which the model went on; with `echo` it is repeated.
    thoughts_inline: thoughts are reported, but stay in the content too, with their tags (`deepseek-legacy`).
    """

    tags: ReasoningTags | None = None
    opens_in_thoughts: bool = False
    given: str = ""
    echo: bool = False
    thoughts_inline: bool = False


class AnswerParser:
    """Text of one choice in, deltas out, and at the end the message. Text given out is never revised."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._splitter = None
        if shape.tags is not None:
            self._splitter = ReasoningSplitter(shape.tags, is_open=shape.opens_in_thoughts)
        self._thoughts: list[str] = []
        self._content: list[str] = []
        given = self._read(shape.given)
        self._waiting: list[Delta] = []
        if shape.echo:
            self._waiting = given
        else:
            self._thoughts.clear()
            self._content.clear()

    def push(self, text: str) -> list[Delta]:
        """The deltas that `text` makes certain."""
        waiting, self._waiting = self._waiting, []
        return waiting + self._read(text)

    def finish(self) -> list[Delta]:
        """The rest, once the generation has ended."""
        waiting, self._waiting = self._waiting, []
        if self._splitter is not None:
            waiting += self._deltas(*self._splitter.finish(), raw="")
        return waiting

    def message(self) -> dict[str, Any]:
        """The whole message, after `finish`."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        return message

    def _read(self, text: str) -> list[Delta]:
        if self._splitter is None:
            return self._deltas("", text, raw=text)
        return self._deltas(*self._splitter.push(text), raw=text)

    def _deltas(self, thoughts: str, answer: str, *, raw: str) -> list[Delta]:
        """raw: the text as the model wrote it, which is the content when thoughts stay in it."""
        if thoughts:
            self._thoughts.append(thoughts)
        content = raw if self._shape.thoughts_inline else answer
        if content:
            self._content.append(content)
        deltas: list[Delta] = []
        if thoughts and not self._shape.thoughts_inline:
            deltas.append({"reasoning_content": thoughts})
        if content:
            deltas.append({"content": content})
        return deltas


def whole_message(shape: AnswerShape, text: str) -> dict[str, Any]:
    parser = AnswerParser(shape)
    parser.push(text)
    parser.finish()
    return parser.message()
