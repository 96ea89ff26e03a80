"""Separates the thoughts of a model from its answer, piece by piece. Pure.

A thinking block is the first thing in an answer: its start tag was written by the model, or already by the prompt.
Tags that come later are text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    start: str
    end: str


KNOWN_TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
)


def tags_of_template(source: str) -> ReasoningTags | None:
    """The tags that a chat template speaks of. Most templates only ever name the end tag, to strip old thoughts."""
    return next((tags for tags in KNOWN_TAGS if tags.end in source), None)


class PromptEnd(Enum):
    """Where a rendered prompt leaves the model."""

    PLAIN = auto()
    OPEN = auto()  # inside a thinking block
    CLOSED = auto()  # after a thinking block that the prompt closed


def prompt_end(prompt: str, tags: ReasoningTags) -> PromptEnd:
    text = prompt[-256:].rstrip()
    if text.endswith(tags.start):
        return PromptEnd.OPEN
    return PromptEnd.CLOSED if text.endswith(tags.end) else PromptEnd.PLAIN


def partial_length(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker` and is not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class ReasoningSplitter:
    """Text in, (thoughts, answer) out; the sums do not depend on how the text was cut into pieces.

    White space around the thoughts and before the answer that follows them belongs to neither.
    What might still be a tag, or white space before one, is held back. is_open: the prompt opened the block.
    """

    def __init__(self, tags: ReasoningTags, *, is_open: bool = False) -> None:
        self._tags = tags
        self._held = ""
        self._step = self._in_thoughts if is_open else self._at_start
        self._is_blank = True  # no thought was seen yet

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        thoughts = answer = ""
        step = None
        while step is not self._step:  # a step that ends hands the rest to the next one
            step = self._step
            more_thoughts, more_answer = step()
            thoughts += more_thoughts
            answer += more_answer
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """What is held back: an unfinished tag is text after all."""
        rest, self._held = self._held, ""
        if self._step == self._in_thoughts:
            return rest, ""
        return "", "" if self._step == self._after_thoughts else rest

    def _at_start(self) -> tuple[str, str]:
        text, start = self._held.lstrip(), self._tags.start
        if text.startswith(start):
            self._held = text[len(start) :]
            self._step = self._in_thoughts
        elif not start.startswith(text):
            self._step = self._in_answer
        return "", ""

    def _in_thoughts(self) -> tuple[str, str]:
        if self._is_blank:
            self._held = self._held.lstrip()
            if not self._held:
                return "", ""
        end = self._tags.end
        thoughts, tag, rest = self._held.partition(end)
        if tag:
            self._held = rest
            self._step = self._after_thoughts
            return thoughts.rstrip(), ""
        shown = self._held[: len(self._held) - partial_length(self._held, end)].rstrip()
        self._held = self._held[len(shown) :]
        self._is_blank = self._is_blank and not shown
        return shown, ""

    def _after_thoughts(self) -> tuple[str, str]:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._in_answer
        return "", ""

    def _in_answer(self) -> tuple[str, str]:
        answer, self._held = self._held, ""
        return "", answer
