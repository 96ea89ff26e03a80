"""What starts a lazy grammar: a token, a word or a pattern in the text that was free until then. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyllama.errors import InvalidArgument

MAX_PATTERN = 10_000  # characters
FEW_REPETITIONS = 20  # as many may be nested
TRIGGER_KINDS = ("token", "word", "pattern", "full_pattern")
"""The number of a kind in requests is its place here."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """kind: one of `TRIGGER_KINDS`. value: the word or the regular expression; token: the id.

    within: a pattern is only looked for while the text has no more characters than that; 0: always.
    """

    kind: str
    value: str = ""
    token: int = -1
    within: int = 0

    def json(self) -> dict[str, Any]:
        number = TRIGGER_KINDS.index(self.kind)
        return {"type": number, "value": self.value, **({"token": self.token} if self.kind == "token" else {})}


def compile_pattern(pattern: str, *, is_full: bool = False) -> re.Pattern[str]:
    """A client's regular expression. Raises `InvalidArgument`.

    It is searched again and again in the growing text, on the thread that serves every client. So what could take
    exponential time is refused: a repetition inside a repetition, a choice inside one, references to groups.
    """
    if len(pattern) > MAX_PATTERN:
        raise InvalidArgument(f"the pattern has {len(pattern)} characters, more than {MAX_PATTERN}")
    try:
        compiled = re.compile(rf"(?:{pattern})\Z" if is_full else pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidArgument(f"the pattern is not a regular expression: {error}") from None
    if _is_explosive(pattern):
        raise InvalidArgument(
            "the pattern repeats what itself repeats or chooses, or refers to a group: it could take for ever"
        )
    return compiled


def _is_explosive(pattern: str) -> bool:
    parser = re._parser if hasattr(re, "_parser") else __import__("sre_parse")  # type: ignore[attr-defined]

    def explodes(parts: Any, *, in_repeat: bool) -> bool:
        for name, argument in parts:
            kind = str(name)
            if kind in ("GROUPREF", "GROUPREF_EXISTS") or (kind == "BRANCH" and in_repeat):
                return True
            if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                _, most, body = argument
                repeats = int(most) > FEW_REPETITIONS
                if (repeats and in_repeat) or explodes(body, in_repeat=in_repeat or repeats):
                    return True
            elif kind == "BRANCH":
                if any(explodes(branch, in_repeat=in_repeat) for branch in argument[1]):
                    return True
            elif kind in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
                body = argument if kind == "ATOMIC_GROUP" else argument[-1]
                if explodes(body, in_repeat=in_repeat):
                    return True
        return False

    return explodes(parser.parse(pattern), in_repeat=False)


Replay = list["int | bytes"]
"""What a grammar reads when it starts: tokens, or the end of a token whose beginning was still free text."""


class TriggerWatch:
    """Reads free text until a trigger is met. Raises `InvalidArgument` for a pattern that cannot be used."""

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self._tokens = frozenset(trigger.token for trigger in triggers if trigger.kind == "token")
        self.words = tuple(trigger.value.encode() for trigger in triggers if trigger.kind == "word")
        self._patterns = [
            (compile_pattern(trigger.value), _full(trigger), trigger.within, trigger.kind == "full_pattern")
            for trigger in triggers
            if trigger.kind in ("pattern", "full_pattern")
        ]
        self._text = b""  # with patterns all of it, otherwise what may be the beginning of a word
        self._tail: list[tuple[int | bytes, int]] = []  # tokens, and where their bytes begin in `_text`

    def copy(self) -> TriggerWatch:
        other = TriggerWatch(())
        other._tokens, other.words = self._tokens, self.words
        other._patterns = list(self._patterns)
        other._text, other._tail = self._text, list(self._tail)
        return other

    @property
    def is_over(self) -> bool:
        """Nothing can start the grammar any more."""
        return not (self._tokens or self.words or self._patterns)

    @property
    def text(self) -> bytes:
        """The end of the text so far, long enough to tell how much of a word it holds."""
        return self._text

    def push(self, token: int | bytes, piece: bytes) -> Replay | None:
        """The next token with its bytes, or only bytes; what the grammar starts with when a trigger is met."""
        if token in self._tokens:
            return [token]
        self._tail.append((token, len(self._text)))
        self._text += piece
        start = self._match()
        if start >= 0:
            return self._replay(start)
        self._patterns = [entry for entry in self._patterns if not entry[2] or len(self._text) <= entry[2]]
        if not self._patterns:
            self._forget(len(self._text) - max(map(len, self.words), default=1) + 1)
        return None

    def _match(self) -> int:
        """Where the grammar begins; -1 when nothing matches."""
        found = [at for at in (self._text.find(word) for word in self.words) if at >= 0]
        if found:
            return min(found)
        if not self._patterns:
            return -1
        text = self._text.decode("utf-8", "surrogateescape")  # so that every byte has its place
        for search, full, _, only_full in self._patterns:
            match = (full.match(text) if full is not None else None) or (None if only_full else search.search(text))
            if match is not None:
                groups = [i for i in range(1, search.groups + 1) if match[i]]
                return len(text[: match.start(groups[0] if groups else 0)].encode("utf-8", "surrogateescape"))
        return -1

    def _replay(self, start: int) -> Replay:
        replay: Replay = []
        ends = [at for _, at in self._tail[1:]] + [len(self._text)]
        for (token, begin), end in zip(self._tail, ends, strict=True):
            if begin >= start:
                replay.append(token)
            elif end > start:
                replay.append(self._text[start:end])
        return replay

    def _forget(self, before: int) -> None:
        """Drop the tokens that end before that place of the text."""
        while len(self._tail) > 1 and self._tail[1][1] <= before:
            del self._tail[0]
        if self._tail and before > 0:
            offset = self._tail[0][1]
            self._text = self._text[offset:]
            self._tail = [(token, at - offset) for token, at in self._tail]


def _full(trigger: Trigger) -> re.Pattern[str] | None:
    value = trigger.value
    if trigger.kind == "full_pattern" or (value.startswith("^") and value.endswith("$")):
        return compile_pattern(value.removeprefix("^").removesuffix("$"), is_full=True)
    return None
